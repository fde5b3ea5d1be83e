// Package order has the formats of update orders on a cluster's Nodes and of the machines' answers.
// Both are annotations, and untrusted input to their readers.
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

// Annotations of a Node, with which a cluster orders the update of a machine and the machine
// answers. They contain no secrets.
const (
	AnnotationOrder  = "edgebake.io/update"        // Order
	AnnotationAnswer = "edgebake.io/update-status" // Answer, as JSON
	// AnnotationHalt, with any value, makes the machine carry out no order.
	AnnotationHalt = "edgebake.io/update-halt"
)

// Order is an update that a cluster orders. Its text is the URL of the image, @sha256: and its
// golden digest, and then options:
//
//	https://images.example.com/my-edge.raw.zst@sha256:GOLDEN max-bytes=20M
type Order struct {
	// Image is an http or https URL, or oci:// and a reference to an image in a registry.
	Image string
	// Golden is the golden digest that the image's signed index must have, in hex.
	Golden string
	// Hold makes the machine stop before it writes the new system's boot entry, until the order
	// comes without it.
	Hold bool
	// MaxBytes and Rate limit the bytes that are fetched in total and per second; "" means no
	// limit.
	MaxBytes, Rate string
	// NoDrain has the machine evict no pods before it restarts.
	NoDrain bool
	// Again distinguishes an order from an earlier, otherwise identical one.
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
				err = fmt.Errorf("%q has other characters than letters, digits, and : . _ -, or more than 40", printable.Short(value, 60))
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

// Registry is the scheme of an Image in a registry.
const Registry = "oci"

// ParseRegistry reads an Image in a registry: oci://REGISTRY/REPOSITORY:TAG.
func ParseRegistry(text string) (imageref.Ref, error) {
	return imageref.Parse(strings.TrimPrefix(text, Registry+"://"))
}

// InRegistry reports whether an Image is in a registry.
func InRegistry(text string) bool { return strings.HasPrefix(text, Registry+"://") }

// CheckImage checks the Image of an order.
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
		return errors.New("the image's URL has a login, and everybody who can read the Node would read it")
	case strings.ContainsAny(text, " \t\r\n"):
		return fmt.Errorf("%q has blanks", printable.Short(text, 200))
	}
	return nil
}

// CutGolden cuts IMAGE@sha256:GOLDEN in two. The image itself may have a digest, of its
// manifest in a registry.
func CutGolden(text string) (image, golden string, found bool) {
	const sep = "@sha256:"
	if i := strings.LastIndex(text, sep); i >= 0 {
		return text[:i], text[i+len(sep):], true
	}
	return text, "", false
}

// String returns the order as in the annotation.
func (o Order) String() string {
	s := o.Key()
	if o.Hold {
		s += " hold"
	}
	return s
}

// Key identifies the order: its text without Hold.
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
	StateWaiting    = "waiting"    // it cannot begin or continue now, and tries again
	StateWorking    = "working"    // Step is in progress
	StateHeld       = "held"       // everything is fetched; it waits for the order without hold
	StateRestarting = "restarting" // the new system's boot entry is written next
	StateTrial      = "trial"      // the new system runs, but is not kept yet
	StateDone       = "done"       // the machine keeps the new system
	StateFailed     = "failed"     // this order is not tried again
	StateWithdrawn  = "withdrawn"  // the order was removed or changed before the new system could boot
)

// Answer is a machine's report of its system and of its last order.
type Answer struct {
	// Plan is the plan of the running system, Image its name and Serial its serial.
	Plan   string `json:"plan"`
	Image  string `json:"image,omitempty"`
	Serial int    `json:"serial,omitempty"`
	// Order is the Key of the order to which the rest belongs; "" if there was none.
	Order  string `json:"order,omitempty"`
	State  string `json:"state,omitempty"`
	Step   string `json:"step,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Fetched of Total bytes have been fetched over the network.
	Fetched int64 `json:"fetched,omitempty"`
	Total   int64 `json:"total,omitempty"`
}

// maxReason limits the length of an Answer's Reason.
const maxReason = 400

// String returns the answer as in the annotation.
func (a Answer) String() string {
	a.Order, a.Reason = printable.Short(a.Order, maxOrder), printable.Short(a.Reason, maxReason)
	b, err := json.Marshal(a)
	if err != nil {
		panic("BUG: " + err.Error()) // it has only strings and numbers
	}
	return string(b)
}

// ParseAnswer parses an answer, which anyone who may change the Node can have written. The zero
// value is that of a machine that never answered.
func ParseAnswer(text string) Answer {
	var a Answer
	if len(text) > 4*maxOrder || json.Unmarshal([]byte(text), &a) != nil {
		return Answer{}
	}
	a.Reason, a.Step, a.State = printable.Short(a.Reason, maxReason), printable.Short(a.Step, 20), printable.Short(a.State, 20)
	return a
}
