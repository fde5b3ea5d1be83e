package update

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
)

const (
	// OrderFile records the last order, on DATA.
	OrderFile = ondisk.StateDir + "/order.json"
	// askedFile contains the time at which the Node was last read, and the answer in its annotation.
	askedFile = ondisk.RunMark + "order"
	// committedFile exists from the commit of an order until the restart is requested, or the update
	// fails.
	committedFile = ondisk.RunMark + "order-committed"
)

const orderRecordVersion = 1

// orderRecord is the contents of OrderFile.
type orderRecord struct {
	Version int    `json:"version"`
	Order   string `json:"order"` // the order's Key
	// Plan is the plan of the ordered image. It is set once the order is committed.
	Plan   string `json:"plan,omitempty"`
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
	// Tries counts the attempts since the last complete download that were cut off, for example by a
	// power cut. Fetched is set only if the order has a limit: it is the number of bytes downloaded,
	// or slightly more.
	Tries   int   `json:"tries,omitempty"`
	Fetched int64 `json:"fetched,omitempty"`
	// Failures counts the consecutive attempts that failed because of the connection or the server.
	// After one, the next attempt begins at Next.
	Failures int       `json:"failures,omitempty"`
	Next     time.Time `json:"next,omitzero"`
	// Trials lists the plans that orders have put on trial on this machine.
	Trials []planTrials `json:"trials,omitempty"`
}

// planTrials counts the trials of one plan.
type planTrials struct {
	Plan  string `json:"plan"`
	Count int    `json:"count"`
	Again string `json:"again,omitempty"` // Again of the order that caused the last trial
}

// maxTrials is the number of times that orders may put one plan on trial. Without this limit,
// everyone who may patch the Node could restart the machine forever, with orders for a system that
// fails, or for two systems in turn.
const maxTrials = 3

// next returns the record of an order that replaces this one.
func (r *orderRecord) next(key string) orderRecord {
	return orderRecord{Order: key, Trials: r.Trials}
}

// trials returns the trials of a plan.
func (r *orderRecord) trials(plan string) *planTrials {
	i := slices.IndexFunc(r.Trials, func(t planTrials) bool { return t.Plan == plan })
	if i < 0 {
		return &planTrials{}
	}
	return &r.Trials[i]
}

// countTrial records that an order puts a plan on trial.
func (r *orderRecord) countTrial(plan, again string) {
	if r.trials(plan).Plan == "" {
		r.Trials = append(r.Trials, planTrials{Plan: plan})
	}
	t := r.trials(plan)
	t.Count, t.Again = t.Count+1, again
}

// uncountTrial undoes countTrial: the machine did not restart.
func (r *orderRecord) uncountTrial() {
	t := r.trials(r.Plan)
	t.Count = max(0, t.Count-1)
}

// maxTries is the number of attempts that may be cut off before the machine gives up an order.
const maxTries = 5

// The pause after an attempt that failed because of the connection or the server, counted from the
// last read of the Node. It doubles with each consecutive failure. Its maximum is the interval at
// which machines on a metered link read the Node.
const (
	firstOrderPause = 10 * time.Minute
	maxOrderPause   = askMetered
)

// askMetered is the interval at which the Node is read over a metered link if there is nothing to
// report.
const askMetered = 55 * time.Minute

var errWithdrawn = errors.New("the order was withdrawn or changed")

// orders carries out update orders of the cluster.
type orders struct {
	e       *machine.Env
	node    string
	image   ondisk.ImageInfo // of the running system
	active  *site.Active     // nil if there is no Site
	metered bool
	record  orderRecord
	sent    string    // the answer in the Node's annotation
	asked   time.Time // when the Node was last read
}

// CarryOutOrder reads this machine's Node with kubelet's credentials, carries out a new update
// order in it, and writes the answer to the Node. If no API server is reachable, it does nothing.
func CarryOutOrder(ctx context.Context, e *machine.Env, tell func(run.Step)) error {
	o := &orders{e: e, node: member.NodeName(e)}
	if o.node == "" {
		return nil
	}
	err := uncordonAfterKill(ctx, e)
	if err != nil {
		e.Log.Warn("making the Node schedulable again", "error", err)
	}
	if o.image, err = site.ImageInfo(e); err != nil {
		return err
	}
	o.active = site.IfAny(e, o.image)
	o.metered = o.active != nil && o.active.Site.IPVS.Profile == "metered"
	if err := o.load(); err != nil {
		return err
	}
	if !o.due() {
		return nil
	}
	text, err := o.read(ctx)
	if err != nil {
		e.Log.Info("the Node cannot be read, so it is unknown whether an update is ordered", "error", err)
		return nil
	}
	ordered, err := o.accept(text)
	if err != nil {
		o.send(ctx)
		return err
	}
	if ordered == nil {
		o.send(ctx)
		return nil
	}
	return o.carryOut(ctx, *ordered, tell)
}

// OrderStatus returns the state of the last order, as the Node has it. It returns nil if there was
// no order, or the order is done.
func OrderStatus(e *machine.Env) *ondisk.OrderState {
	image, err := site.ImageInfo(e)
	if err != nil {
		return nil
	}
	o := &orders{e: e, image: image}
	if json.Unmarshal(e.Contents(OrderFile), &o.record) != nil || o.record.Version != orderRecordVersion {
		return nil
	}
	o.active = site.IfAny(e, image)
	a := order.ParseAnswer(o.answer().String())
	if a.Order == "" || a.State == order.StateDone {
		return nil
	}
	return &ondisk.OrderState{Order: a.Order, State: a.State, Reason: a.Reason}
}

// load reads OrderFile. If the recorded order was committed, load determines its result.
func (o *orders) load() error {
	b, err := o.e.ReadIfExists(OrderFile)
	if err != nil { // a record without its counts would let a failed order begin again
		return fmt.Errorf("reading the record of the last order: %w", err)
	}
	if b == nil {
		return nil
	}
	if err := json.Unmarshal(b, &o.record); err != nil || o.record.Version != orderRecordVersion {
		o.e.Log.Warn("the record of the last order is unusable, and is replaced", "file", OrderFile)
		o.record = orderRecord{}
		return nil
	}
	switch s := o.record.State; {
	case s == order.StateRestarting:
	case (s == order.StateFailed || s == order.StateWithdrawn) && o.record.Plan != "" && o.record.Plan == o.image.Plan:
		// The order failed or was withdrawn after its boot entry was written, and then its system
		// booted.
		o.record.State, o.record.Reason = order.StateRestarting, ""
	default:
		return nil
	}
	if o.image.Plan == o.record.Plan {
		if run.OnTrial(o.e) {
			return nil
		}
		return o.end(order.StateDone, "")
	}
	plan, err := readPlan(o.e)
	if err != nil {
		return err
	}
	s := settled(o.e)
	another := plan != o.record.Plan // another update has begun after the order's; plan is "" once it has ended
	failed := s != nil && s.Status == ondisk.UpdateFailed
	plans, err := failedPlans(o.e)
	switch {
	case err != nil:
		return err
	case failed && !another, another && slices.Contains(plans, o.record.Plan):
		return o.end(order.StateFailed, "the new system failed to start, and the machine runs the previous one; journalctl --list-boots on the machine lists the boots")
	case another && (failed || plan == "" || plan == o.image.Plan && !run.OnTrial(o.e)):
		return o.end(order.StateFailed, fmt.Sprintf("another image was installed after that of the order, and the machine runs %s (plan %s)", o.image.Name, o.image.Plan))
	case s == nil, s.Status == ondisk.UpdateTrial:
		return nil // unknown until the boot entries can be read, or the trial ends
	case s.Status == ondisk.UpdatePending && (another || !o.e.Exists(committedFile)):
		return nil
	}
	// The update was interrupted before its boot entry was written, or before the restart.
	o.record.uncountTrial()
	return o.end(order.StateWorking, "")
}

// end records a state of the order.
func (o *orders) end(state, reason string) error {
	o.record.Version, o.record.State, o.record.Reason = orderRecordVersion, state, reason
	b, err := json.Marshal(o.record)
	if err == nil {
		err = o.e.WriteFile(OrderFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		err = fmt.Errorf("recording the order: %w", err)
		o.record.State, o.record.Reason = order.StateWaiting, machine.OneLine(err) // not on disk, but the answer to the Node reports it
	}
	return err
}

// due reports whether the Node must be read in this run.
func (o *orders) due() bool {
	at, answer, _ := strings.Cut(o.e.Text(askedFile), "\n")
	asked, err := time.Parse(time.RFC3339, at)
	since := o.e.Now().Sub(asked)
	opened := o.active != nil && !o.active.Site.Updates.Open(asked) && o.closed() == nil
	return !o.metered || opened || o.record.State == order.StateHeld || err != nil || since < 0 || since >= askMetered || answer != o.answer().String()
}

// closed returns the reason why the machine may not be updated now, or nil.
func (o *orders) closed() error { return closed(o.e, o.image, o.active) }

// answer returns the answer to write to the Node.
func (o *orders) answer() order.Answer {
	r := o.record
	a := order.Answer{Plan: o.image.Plan, Image: o.image.Name, Serial: o.image.UpdateSerial, Order: r.Order, State: r.State, Reason: r.Reason}
	switch s := Status(o.e); {
	case run.OnTrial(o.e): // also after an update by hand: a rollout must not count the node as done
		a.State, a.Reason = order.StateTrial, ""
	case r.State == order.StateHeld:
		// Otherwise a rollout would drain a held node and permit its restart.
		if err := o.closed(); err != nil {
			a.State, a.Step, a.Reason = order.StateWaiting, order.StepWindow, err.Error()
		}
	case r.State == order.StateWaiting && o.closed() != nil:
		a.Step = order.StepWindow
	case r.State == order.StateWorking && s != nil && s.Status == ondisk.UpdateRunning:
		a.Step, a.Fetched, a.Total = s.Phase, s.Fetched, s.Total
	}
	return a
}

// nodeTime limits the time of one request for the Node.
const nodeTime = 20 * time.Second

func (o *orders) client(ctx context.Context) (context.Context, context.CancelFunc, *kubeapi.Client, error) {
	c, err := member.NodeClient(o.e)
	ctx, cancel := context.WithTimeout(ctx, nodeTime)
	return ctx, cancel, c, err
}

func (o *orders) path() string { return "/api/v1/nodes/" + o.node }

// read returns the order in the Node's annotation, or "" if there is none or AnnotationHalt is
// set.
func (o *orders) read(ctx context.Context) (string, error) {
	ctx, cancel, c, err := o.client(ctx)
	defer cancel()
	o.asked = o.e.Now()
	if err != nil {
		return "", err
	}
	m, err := c.GetMetadata(ctx, o.path())
	if err != nil {
		return "", err
	}
	o.sent = m.Annotations[order.AnnotationAnswer]
	o.mark()
	if _, halted := m.Annotations[order.AnnotationHalt]; halted {
		return "", nil
	}
	return m.Annotations[order.AnnotationOrder], nil
}

// send writes the answer to the Node, unless the Node has it. After a failure, the next call tries
// again.
func (o *orders) send(ctx context.Context) {
	answer := o.answer().String()
	if answer == o.sent {
		return
	}
	ctx, cancel, c, err := o.client(ctx)
	defer cancel()
	if err == nil {
		err = c.MergePatch(ctx, o.path(), map[string]any{"metadata": map[string]any{"annotations": map[string]string{order.AnnotationAnswer: answer}}})
	}
	if err != nil {
		o.e.Log.Warn("writing the state of the update to the Node", "error", err)
		return
	}
	o.sent = answer
	o.mark()
}

// mark records when the Node was last read, and the answer that it has.
func (o *orders) mark() {
	if err := o.e.WriteFile(askedFile, []byte(o.asked.UTC().Format(time.RFC3339)+"\n"+o.sent), machine.Mode(0o600)); err != nil {
		o.e.Log.Warn("recording when the Node was read", "error", err)
	}
}

// keyOf parses an order and returns its key. The key of an invalid order is the beginning of its
// text.
func keyOf(text string) (order.Order, string, error) {
	x, err := order.Parse(text)
	if err != nil {
		return x, printable.Short(text, 200), err
	}
	return x, x.Key(), nil
}

// accept returns the order if it must be carried out now. Otherwise it records the reason.
func (o *orders) accept(text string) (*order.Order, error) {
	r := &o.record
	if text == "" {
		if r.State == order.StateWorking || r.State == order.StateWaiting || r.State == order.StateHeld {
			return nil, o.end(order.StateWithdrawn, errWithdrawn.Error())
		}
		return nil, nil
	}
	x, key, err := keyOf(text)
	if key == r.Order && r.settled(x) {
		return nil, nil
	}
	former := *r
	if key != r.Order {
		*r = r.next(key)
	} else if r.State == order.StateWithdrawn {
		*r = r.next(key)
		r.Fetched = former.Fetched // max-bytes of an order applies to all its attempts together
	}
	if err != nil {
		return nil, o.end(order.StateFailed, machine.OneLine(err))
	}
	if last, _, _ := keyOf(former.Order); former.State == order.StateDone && former.Plan == o.image.Plan && last.Golden == x.Golden && !pending(o.e) {
		r.Plan = former.Plan
		return nil, o.end(order.StateDone, alreadyRuns)
	}
	if why := o.rejection(x); why != "" {
		return nil, o.end(order.StateFailed, why)
	}
	if pause := r.Next.Sub(o.e.Now()); pause > 0 && pause <= maxOrderPause { // ignore a longer pause: the clock was set back
		return nil, nil
	}
	if err := o.closed(); err != nil {
		return nil, o.end(order.StateWaiting, err.Error())
	}
	return &x, nil
}

// settled reports whether there is nothing left to do for the recorded order x.
func (r *orderRecord) settled(x order.Order) bool {
	switch r.State {
	case order.StateDone, order.StateFailed, order.StateRestarting:
		return true
	case order.StateHeld:
		return x.Hold
	}
	return false
}

// rejection returns the reason why this machine does not carry out the order, or "" if it does.
func (o *orders) rejection(x order.Order) string {
	switch {
	case len(o.image.UpdateKeys) == 0:
		return "the machine's image names no keys (updates.keys), so it accepts no orders: update it by hand to an image that names some"
	case o.metered && x.MaxBytes == "":
		return "the machine has a metered link: add a limit to the order, e.g. max-bytes=20M"
	case o.record.Tries >= maxTries:
		return fmt.Sprintf("gave up after %d tries: %s", o.record.Tries, cmp.Or(o.record.Reason, "each was cut off, for example by a power cut"))
	}
	return ""
}

// mayTry returns the reason why the order may not put a plan on trial, or nil.
func (o *orders) mayTry(x order.Order, plan string) error {
	failed, err := failedPlans(o.e)
	switch t := o.record.trials(plan); {
	case err != nil:
		return err
	case t.Count >= maxTrials:
		return fmt.Errorf("orders have installed this image %d times on this machine, and may not do so again: run `firstboot update` on the machine, or build the image with a higher updates.serial", t.Count)
	case slices.Contains(failed, plan) && (x.Again == "" || x.Again == t.Again):
		return errors.New("this machine has tried this image and returned to the previous system: to try it once more, add a new again=WORD to the order")
	}
	return nil
}

const alreadyRuns = "the machine already runs this image"

// carryOut carries out an accepted order.
func (o *orders) carryOut(parent context.Context, x order.Order, tell func(run.Step)) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	r := &o.record
	r.Tries++
	if err := o.end(order.StateWorking, ""); err != nil {
		o.send(ctx)
		return err
	}
	o.send(ctx)
	opts := Options{Image: x.Image, Golden: x.Golden, Rate: bytesOf(x.Rate), MaxBytes: bytesOf(x.MaxBytes), NoDrain: x.NoDrain, Commit: o.commit}
	opts.Admit = func(next ondisk.ImageInfo) error { return o.mayTry(x, next.Plan) }
	opts.Spent, opts.Record = r.Fetched, func(n int64) error {
		r.Fetched = n
		return o.end(r.State, r.Reason)
	}
	err := Update(ctx, o.e, opts, func(s run.Step) {
		tell(s)
		// Once commit has confirmed the order, it cannot be withdrawn.
		if r.State == order.StateRestarting {
			return
		}
		if err := o.closed(); err != nil {
			cancel(err)
			return
		}
		if o.e.Now().Sub(o.asked) < o.lookEvery() {
			return
		}
		if text, err := o.read(ctx); err == nil && !o.stands(text) {
			cancel(errWithdrawn)
		} else if err == nil {
			o.send(ctx)
		}
	})
	switch {
	case err == nil:
		return o.e.Remove(committedFile)
	case parent.Err() != nil:
		return parent.Err() // the next run continues
	case errors.Is(context.Cause(ctx), errWithdrawn), errors.Is(context.Cause(ctx), errClosed):
		err = context.Cause(ctx)
	}
	err = o.conclude(err)
	o.send(parent)
	return err
}

// conclude records the result of an attempt that did not restart the machine.
func (o *orders) conclude(err error) error {
	r, reason := &o.record, machine.OneLine(err)
	if r.State == order.StateRestarting {
		r.uncountTrial()
	}
	if err := o.e.Remove(committedFile); err != nil {
		return err
	}
	switch {
	case errors.Is(err, errWithdrawn):
		err = o.end(order.StateWithdrawn, errWithdrawn.Error())
	case errors.Is(err, run.ErrAlready):
		r.Plan = o.image.Plan
		err = o.end(order.StateDone, alreadyRuns)
	case errors.Is(err, errHeld), r.State == order.StateHeld && errors.Is(err, errClosed):
		err = nil // the state is recorded
	case errors.As(err, new(*busy)), errors.Is(err, errClosed):
		r.Tries = max(0, r.Tries-1)
		err = o.end(order.StateWaiting, reason)
	case errors.As(err, new(*temporaryError)):
		r.Tries = max(0, r.Tries-1)
		r.Next = o.asked.UTC().Truncate(time.Second).Add(min(firstOrderPause<<min(r.Failures, 10), maxOrderPause))
		r.Failures++
		err = o.end(order.StateWaiting, fmt.Sprintf("%s; next attempt after %s", printable.Short(reason, 350), r.Next.Format("15:04 MST")))
	case r.State != order.StateRestarting && errors.Is(err, context.DeadlineExceeded) && r.Tries < maxTries:
		err = o.end(order.StateWaiting, reason)
	default:
		err = o.end(order.StateFailed, reason)
	}
	return err
}

// lookEvery returns the interval at which the order is read again during a download.
func (o *orders) lookEvery() time.Duration {
	if o.metered {
		return 15 * time.Minute
	}
	return 2 * time.Minute
}

// stands reports whether text, read from the Node, is still the recorded order.
func (o *orders) stands(text string) bool {
	_, key, err := keyOf(text)
	return err == nil && key == o.record.Order
}

// bytesOf parses a number of bytes in a valid order. Without a number it returns 0.
func bytesOf(text string) int64 {
	n, _ := forms.ParseSize(text)
	return n
}

// holdPatience is how long a run waits for the end of a hold, or for an API server's confirmation.
// Then the run ends, so that other changes are possible, and the timer's next run continues.
const holdPatience = 10 * time.Minute

var errHeld = errors.New("the order is on hold")

// commit waits until the Node confirms the order without a hold. Then it records that the new
// system boots next.
func (o *orders) commit(ctx context.Context, plan string, say func(format string, args ...any)) error {
	if o.record.Tries > 0 {
		// The download is complete, so later failures must not count as failed downloads.
		o.record.Tries, o.record.Failures = 0, 0
		if err := o.end(o.record.State, ""); err != nil {
			return err
		}
	}
	pause, most := 15*time.Second, 2*time.Minute
	if o.metered {
		pause, most = time.Minute, 8*time.Minute
	}
	for end := o.e.Now().Add(holdPatience); ; {
		if err := o.closed(); err != nil {
			return &busy{err}
		}
		text, err := o.read(ctx)
		x, _, _ := keyOf(text)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			say("an API server to confirm the order: %s", machine.OneLine(err))
			err = fmt.Errorf("no API server confirms the order: %w", err)
		case !o.stands(text):
			return errWithdrawn
		case !x.Hold:
			o.record.Plan = plan
			o.record.countTrial(plan, x.Again)
			if err := o.e.WriteFile(committedFile, nil, machine.Mode(0o600)); err != nil {
				return fmt.Errorf("recording the order: %w", err)
			}
			if err := o.end(order.StateRestarting, ""); err != nil {
				return err
			}
			o.send(ctx)
			return nil
		default:
			err = errHeld
			if o.record.State != order.StateHeld {
				if err := o.end(order.StateHeld, ""); err != nil {
					return err
				}
			}
			o.send(ctx)
			say("the hold to be removed from the order")
		}
		if !o.e.Now().Before(end) {
			return &busy{err}
		}
		if err := o.e.Sleep(ctx, pause+time.Duration(o.e.Rand()*float64(pause)/4)); err != nil {
			return err
		}
		pause = min(pause*3/2, most)
	}
}
