// Package order defines the formats of update orders on a cluster's Nodes, and of the machines'
// answers. Both are annotations, which readers must not trust.
package order

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/printable"
)

// Annotations of a Node through which a cluster orders the update of a machine, and the machine
// answers. They contain no secrets.
const (
	AnnotationOrder  = "edgebake.io/update"        // Order
	AnnotationAnswer = "edgebake.io/update-status" // Answer, as JSON
	// AnnotationHalt stops the machine from carrying out orders, whatever its value.
	AnnotationHalt = "edgebake.io/update-halt"
)

// Order is an update that a cluster orders. As text, it is the URL of the image, @sha256: and the
// golden digest, and then options:
//
//	https://images.example.com/my-edge.raw.zst@sha256:GOLDEN max-bytes=20M
type Order struct {
	// Image is an http or https URL, or oci:// followed by the reference of an image in a registry.
	Image string
	// Golden is the golden digest, in hexadecimal, that the image's signed index must have.
	Golden string
	// Hold makes the machine stop before it writes the new system's boot entry, until the order is
	// written again without Hold.
	Hold bool
	// MaxBytes limits the number of bytes that are fetched, and Rate the bytes per second. "" means
	// no limit.
	MaxBytes, Rate string
	// NoDrain makes the machine restart without evicting pods.
	NoDrain bool
	// Again distinguishes an order from an earlier order that is otherwise identical.
	Again string
}

// maxOrder limits the length of an order.
const maxOrder = 2048

var (
	goldenForm = regexp.MustCompile(`^[0-9a-f]{64}$`)
	againForm  = regexp.MustCompile(`^[A-Za-z0-9:._-]{1,40}$`)
)

// Parse parses an order. It returns all errors at once.
func Parse(text string) (Order, error) {
	if len(text) > maxOrder {
		return Order{}, fmt.Errorf("the order has %d bytes, at most %d are accepted", len(text), maxOrder)
	}
	words := strings.Fields(text)
	if len(words) == 0 {
		return Order{}, errors.New("the order is empty")
	}
	var o Order
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	var ok bool
	if o.Image, o.Golden, ok = CutGolden(words[0]); !ok || !goldenForm.MatchString(o.Golden) {
		bad("want URL@sha256:GOLDEN, with the golden digest of the image (64 hexadecimal digits; edgebake inspect prints it)")
	}
	errs = append(errs, CheckImage(o.Image))
	for _, w := range words[1:] {
		name, value, _ := strings.Cut(w, "=")
		var err error
		switch name {
		case "hold":
			o.Hold = true
		case "no-drain":
			o.NoDrain = true
		case "max-bytes":
			o.MaxBytes = value
			_, err = forms.ParseSize(value)
		case "limit-rate":
			o.Rate = value
			_, err = forms.ParseSize(value)
		case "again":
			if o.Again = value; !againForm.MatchString(value) {
				err = fmt.Errorf("%q: write at most 40 letters, digits and : . _ -", printable.Short(value, 60))
			}
		default:
			bad("%q is unknown: want hold, no-drain, max-bytes=20M, limit-rate=500k or again=WORD", printable.Short(w, 60))
		}
		if err != nil {
			bad("%s: %w", name, err)
		}
	}
	return o, errors.Join(errs...)
}

// CheckGolden returns an error if text is not a golden digest.
func CheckGolden(text string) error {
	if !goldenForm.MatchString(text) {
		return fmt.Errorf("@sha256:%s is not a golden digest, which has 64 hexadecimal digits: edgebake inspect prints it", printable.Short(text, 80))
	}
	return nil
}

// Registry is the URL scheme of an Image in a registry.
const Registry = "oci"

// ParseRegistry parses the Image of an order that is in a registry: oci://REGISTRY/REPOSITORY:TAG.
func ParseRegistry(text string) (imageref.Ref, error) {
	return imageref.Parse(strings.TrimPrefix(text, Registry+"://"))
}

// InRegistry reports whether an order's Image is in a registry.
func InRegistry(text string) bool { return strings.HasPrefix(text, Registry+"://") }

// CheckImage returns an error if an order's Image is invalid.
func CheckImage(text string) error {
	if InRegistry(text) {
		if _, err := ParseRegistry(text); err != nil {
			return fmt.Errorf("%w; want oci://REGISTRY/REPOSITORY:TAG", err)
		}
		return nil
	}
	switch u, err := url.Parse(text); {
	case err != nil, u.Scheme != "https" && u.Scheme != "http", u.Host == "":
		return fmt.Errorf("%q is not a URL that begins with https://, http:// or oci://", printable.Short(text, 200))
	case u.User != nil:
		return errors.New("the image's URL contains credentials, which everyone who can read the Node would see: remove them")
	case strings.ContainsAny(text, " \t\r\n"):
		return fmt.Errorf("%q contains white space", printable.Short(text, 200))
	}
	return nil
}

// CutGolden splits IMAGE@sha256:GOLDEN into image and golden digest. IMAGE itself may end with the
// digest of its manifest in a registry.
func CutGolden(text string) (image, golden string, found bool) {
	const sep = "@sha256:"
	if i := strings.LastIndex(text, sep); i >= 0 {
		return text[:i], text[i+len(sep):], true
	}
	return text, "", false
}

// String returns the order in the form of the annotation.
func (o Order) String() string {
	s := o.Key()
	if o.Hold {
		s += " hold"
	}
	return s
}

// Key returns a text that identifies the order: its annotation without Hold.
func (o Order) Key() string {
	s := o.Image + "@sha256:" + o.Golden
	if o.NoDrain {
		s += " no-drain"
	}
	for _, w := range []struct{ name, value string }{{"max-bytes", o.MaxBytes}, {"limit-rate", o.Rate}, {"again", o.Again}} {
		if w.value != "" {
			s += " " + w.name + "=" + w.value
		}
	}
	return s
}

// States of an Answer.
const (
	StateWaiting    = "waiting"    // the machine cannot begin or continue now, and will try again
	StateWorking    = "working"    // the machine performs Step
	StateHeld       = "held"       // everything is fetched; the machine waits for the order without Hold
	StateRestarting = "restarting" // the machine is about to write the new system's boot entry
	StateTrial      = "trial"      // the new system runs, but may still be given up
	StateDone       = "done"       // the machine keeps the new system
	StateFailed     = "failed"     // the machine does not try this order again
	StateWithdrawn  = "withdrawn"  // the order was removed or changed before the new system could boot
)

// StepWindow is the Step of an Answer with StateWaiting while the machine waits for its window.
const StepWindow = "window"

// Answer is a machine's report about its running system and its last order.
type Answer struct {
	// Plan, Image and Serial describe the running system: the plan's ID, and the image's name and
	// serial.
	Plan   string `json:"plan"`
	Image  string `json:"image,omitempty"`
	Serial int    `json:"serial,omitempty"`
	// Order is the Key of the order to which the following fields belong; "" if there was no order.
	Order  string `json:"order,omitempty"`
	State  string `json:"state,omitempty"`
	Step   string `json:"step,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Fetched is the number of bytes fetched over the network so far, out of Total.
	Fetched int64 `json:"fetched,omitempty"`
	Total   int64 `json:"total,omitempty"`
}

// MaxReason limits the length of an Answer's Reason, in characters.
const MaxReason = 400

// maxName limits the length of an Answer's Plan and Image.
const maxName = 100

// String returns the answer in the form of the annotation.
func (a Answer) String() string {
	a.Order, a.Reason = printable.Short(a.Order, maxOrder), printable.Short(a.Reason, MaxReason)
	b, err := json.Marshal(a)
	if err != nil {
		panic("BUG: " + err.Error()) // cannot fail: it has only strings and numbers
	}
	return string(b)
}

// ParseAnswer parses an answer. It is untrusted, because anyone who may change the Node can write
// one. An invalid answer gives the zero value, as if the machine had never answered.
func ParseAnswer(text string) Answer {
	var a Answer
	if len(text) > 4*maxOrder || json.Unmarshal([]byte(text), &a) != nil {
		return Answer{}
	}
	a.Reason, a.Step, a.State = printable.Short(a.Reason, MaxReason), printable.Short(a.Step, 20), printable.Short(a.State, 20)
	a.Plan, a.Image = printable.Short(a.Plan, maxName), printable.Short(a.Image, maxName)
	return a
}
