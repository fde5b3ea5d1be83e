package etcdmember

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/edgebake/edgebake/configs/bytesize"
)

const (
	// defaultQuota is etcd's default quota in bytes. Members before 3.6 do not report theirs.
	defaultQuota = 2 << 30
	// worthwhile is the minimum of unused bytes for defragmenting a database.
	worthwhile = 64 << 20
	// statusTimeout limits the status request to one member.
	statusTimeout = 8 * time.Second
)

// Status is a member's report on itself.
type Status struct {
	Member   string // the member's ID
	Leader   string // the leader's ID
	Revision int64
	// Size is the size of the database on the disk in bytes; InUse is the part that contains data.
	// etcd rejects writes once Size has reached Quota.
	Size, InUse, Quota int64
}

// Status requests this member's status.
func (e Client) Status(ctx context.Context) (Status, error) {
	var a struct {
		Header struct {
			MemberID string      `json:"member_id"`
			Revision json.Number `json:"revision"`
		} `json:"header"`
		Leader      string      `json:"leader"`
		DBSize      json.Number `json:"dbSize"`
		DBSizeInUse json.Number `json:"dbSizeInUse"`
		DBSizeQuota json.Number `json:"dbSizeQuota"`
	}
	if err := e.post(ctx, "for its status", "/v3/maintenance/status", struct{}{}, &a); err != nil {
		return Status{}, err
	}
	s := Status{Member: a.Header.MemberID, Leader: a.Leader, Revision: number(a.Header.Revision), Size: number(a.DBSize), InUse: number(a.DBSizeInUse), Quota: number(a.DBSizeQuota)}
	if s.Quota <= 0 {
		s.Quota = defaultQuota
	}
	return s, nil
}

// number returns n, or 0 if the field was omitted.
func number(n json.Number) int64 {
	v, _ := strconv.ParseInt(n.String(), 10, 64)
	return v
}

// Crowded reports whether the database has reached 80 % of its quota.
func (s Status) Crowded() bool { return s.Size >= s.Quota/10*8 }

// Fragmented reports whether the database has so much unused space that it should be defragmented.
func (s Status) Fragmented() bool {
	unused := s.Size - s.InUse
	return unused >= worthwhile && (unused >= s.Size/2 || s.Crowded())
}

// Alarm is an alarm of etcd. It is active until it is cleared.
type Alarm struct {
	Member string `json:"memberID"` // the member's ID
	Kind   string `json:"alarm"`
}

// Kinds of alarms. etcd rejects writes while one of them is active.
const (
	NoSpace = "NOSPACE"
	Corrupt = "CORRUPT"
)

// Alarms lists the alarms of all members. It needs a quorum.
func (e Client) Alarms(ctx context.Context) ([]Alarm, error) {
	var a struct{ Alarms []Alarm }
	err := e.post(ctx, "for alarms", "/v3/maintenance/alarm", map[string]string{"action": "GET"}, &a)
	return a.Alarms, err
}

// Disarm clears an alarm.
func (e Client) Disarm(ctx context.Context, a Alarm) error {
	return e.post(ctx, "to clear an alarm", "/v3/maintenance/alarm", map[string]string{"action": "DEACTIVATE", "memberID": a.Member, "alarm": a.Kind}, &struct{}{})
}

// Compact drops values that were overwritten or deleted before a revision.
func (e Client) Compact(ctx context.Context, revision int64) error {
	return e.post(ctx, "to compact its history", "/v3/kv/compaction", map[string]any{"revision": strconv.FormatInt(revision, 10), "physical": true}, &struct{}{})
}

// Defragment returns the unused space of the database to the file system. The member does not
// answer meanwhile.
func (e Client) Defragment(ctx context.Context) error {
	return e.post(ctx, "to defragment its database", "/v3/maintenance/defragment", struct{}{}, &struct{}{})
}

// Maintenance is the etcd maintenance that one member carries out.
type Maintenance struct {
	Own  Client
	Name string // this machine's
	// Others are the other members, by name.
	Others map[string]Client
	// Space returns an error if writing this many bytes would leave too little free space on the
	// disk of a member's machine. A full disk stops etcd.
	Space func(ctx context.Context, member string, bytes int64) error
}

// Maintained is the result of Maintenance.Run.
type Maintained struct {
	// Healthy means that every member answers and votes, and none has an alarm.
	Healthy bool
	// Notes are messages for the operator.
	Notes []string
	// Done lists the changes that were made.
	Done []string
}

func (f *Maintained) note(format string, args ...any) {
	f.Notes = append(f.Notes, fmt.Sprintf(format, args...))
}

func (f *Maintained) did(format string, args ...any) {
	f.Done = append(f.Done, fmt.Sprintf(format, args...))
}

// voter is a member with its status.
type voter struct {
	Member
	etcd Client
	Status
}

// Run checks all databases. On the leader's machine it also frees space, if all members answer: one
// member at a time, because a member does not answer meanwhile, and its own last.
func (u Maintenance) Run(ctx context.Context) (Maintained, error) {
	var f Maintained
	members, err := u.Own.Members(ctx)
	if err != nil {
		return f, err
	}
	alarms, err := u.Own.Alarms(ctx)
	if err != nil {
		return f, err
	}
	own, err := status(ctx, u.Own)
	if err != nil {
		return f, err
	}
	lead := own.Leader == own.Member
	f.Healthy = len(alarms) == 0
	full := f.alarms(alarms, members)
	if lead && len(full) > 0 {
		// etcd rejects writes now, also the API server's own compaction. Ignore the error: there
		// may be nothing new to compact.
		if u.Own.Compact(ctx, own.Revision) == nil {
			f.did("compacted etcd's history")
		}
	}
	voters, away := u.voters(ctx, members, own.Member)
	f.Healthy = f.Healthy && len(away) == 0
	crowded := false
	for _, v := range voters {
		// Until its next write, a member counts the space that a compaction freed as used, and
		// while the alarm is active, there are no writes.
		due := v.Fragmented() || len(full) > 0 && v.Crowded()
		if due && lead {
			if err := u.defragment(ctx, &f, &v, away); err != nil {
				crowded = true
				f.note("etcd's database on %s was not defragmented: %v", v.Name, err)
			} else {
				due = v.Fragmented()
			}
		}
		if v.Crowded() && !due {
			crowded = true
			f.note("etcd's database on %s uses %s of its quota of %s; when it is full, etcd rejects writes. To fix: delete objects that are not needed, or raise quota-backend-bytes (ClusterConfiguration, etcd.local.extraArgs) in the Cluster, and stamp the new Sites of the control-plane nodes", v.Name, bytesize.MiB(v.Size), bytesize.MiB(v.Quota))
		}
	}
	u.disarm(ctx, &f, full, members, lead && !crowded && len(away) == 0)
	return f, nil
}

// Healthy returns all problems of etcd: the named members must be members, each member must vote,
// answer and follow the leader, and no alarm may be active. A healthy etcd of three can lose one.
func (u Maintenance) Healthy(ctx context.Context, named []string) error {
	members, err := u.Own.Members(ctx)
	if err != nil {
		return err
	}
	alarms, err := u.Own.Alarms(ctx)
	if err != nil {
		return err
	}
	own, err := status(ctx, u.Own)
	if err != nil {
		return err
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, name := range named {
		if !slices.ContainsFunc(members, func(m Member) bool { return m.Name == name }) {
			bad("%s is not a member of etcd", name)
		}
	}
	for _, a := range alarms {
		bad("etcd has the alarm %s on %s", a.Kind, nameOf(members, a.Member))
	}
	for _, m := range members {
		if m.Learner {
			bad("the member of etcd on %s is not a voting member yet", orUnnamed(m))
		}
	}
	voters, away := u.voters(ctx, members, own.Member)
	for _, name := range away {
		if !slices.ContainsFunc(members, func(m Member) bool { return m.Learner && orUnnamed(m) == name }) {
			bad("the member of etcd on %s does not answer", name)
		}
	}
	for _, v := range voters {
		if v.Leader == "" || v.Leader != own.Leader {
			bad("the member of etcd on %s does not follow the leader", v.Name)
		}
	}
	return errors.Join(errs...)
}

// disarm clears alarms about a full database if there is enough space again.
func (u Maintenance) disarm(ctx context.Context, f *Maintained, full []Alarm, members []Member, hasSpace bool) {
	for _, a := range full {
		if !hasSpace {
			f.note("etcd rejects writes: its database on %s was full (alarm %s)", nameOf(members, a.Member), a.Kind)
		} else if err := u.Own.Disarm(ctx, a); err != nil {
			f.note("%v", err)
		} else {
			f.did("cleared etcd's alarm %s: there is space again", a.Kind)
		}
	}
}

// alarms adds notes about alarms that need a person, and returns those about a full database.
func (f *Maintained) alarms(alarms []Alarm, members []Member) (full []Alarm) {
	for _, a := range alarms {
		name := nameOf(members, a.Member)
		switch a.Kind {
		case NoSpace:
			full = append(full, a)
		case Corrupt:
			f.note("etcd's data on %s differs from that of the other members (alarm %s), and etcd rejects writes. To fix, while more than half of the other members run: write the image to the disk of %s again; it then joins them with their data", name, a.Kind, name)
		default:
			f.note("etcd has the alarm %s on %s", a.Kind, name)
		}
	}
	return full
}

// nameOf returns the name of a member, or its ID if it is not listed.
func nameOf(members []Member, id string) string {
	for _, m := range members {
		if m.ID == id {
			return orUnnamed(m)
		}
	}
	return id
}

// voters requests the status of all members, this machine's last. away has the names of the members
// that did not answer or do not vote.
func (u Maintenance) voters(ctx context.Context, members []Member, own string) (voters []voter, away []string) {
	slices.SortFunc(members, func(a, b Member) int {
		if (a.ID == own) != (b.ID == own) {
			return map[bool]int{true: 1, false: -1}[a.ID == own]
		}
		return cmp.Compare(a.Name, b.Name)
	})
	for _, m := range members {
		etcd := u.Others[m.Name]
		if m.ID == own {
			etcd = u.Own
		}
		if s, err := status(ctx, etcd); err == nil && !m.Learner {
			voters = append(voters, voter{m, etcd, s})
		} else {
			away = append(away, orUnnamed(m))
		}
	}
	return voters, away
}

// status is Client.Status with a timeout, because a machine that is off does not answer.
func status(ctx context.Context, etcd Client) (Status, error) {
	if etcd.HTTP == nil {
		return Status{}, errors.New("its node is not in this machine's Site")
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	return etcd.Status(ctx)
}

func (u Maintenance) defragment(ctx context.Context, f *Maintained, v *voter, away []string) error {
	if len(away) > 0 {
		return fmt.Errorf("these members do not answer or do not vote: %s", list(away))
	}
	if err := u.Space(ctx, v.Name, v.InUse); err != nil {
		return err
	}
	if err := v.etcd.Defragment(ctx); err != nil {
		return err
	}
	after, err := status(ctx, v.etcd)
	if err != nil {
		return err
	}
	f.did("defragmented etcd's database on %s: now %s, before %s", v.Name, bytesize.MiB(after.Size), bytesize.MiB(v.Size))
	v.Status = after
	return nil
}
