package update

import (
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
)

const windowField = "updates: {window: '02:00-04:00', timeZone: Europe/Berlin}"

// clock sets the time of day in Berlin, on the first day on which that time is not in the past.
func (b *box) clock(text string) {
	b.t.Helper()
	zone, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		b.t.Fatal(err)
	}
	at, err := time.Parse("15:04", text)
	if err != nil {
		b.t.Fatal(err)
	}
	now := b.now.In(zone)
	next := time.Date(now.Year(), now.Month(), now.Day(), at.Hour(), at.Minute(), 0, 0, zone)
	if next.Before(now) {
		next = next.AddDate(0, 0, 1)
	}
	b.now = next
}

// TestOrderWindow checks that outside of the Site's update window an order waits, and nothing is
// downloaded.
func TestOrderWindow(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{windowField}
	b.give()
	for _, at := range []string{"04:00", "12:00", "01:59"} {
		b.clock(at)
		b.must()
		b.says(order.StateWaiting, "updates.window of the machine's Site is 02:00-04:00 Europe/Berlin")
		if step := b.answer().Step; step != order.StepWindow {
			t.Errorf("the step is %q", step)
		}
	}
	if b.images.requests > 0 {
		t.Errorf("%d requests outside the window", b.images.requests)
	}
	b.clock("02:00")
	b.must()
	b.updated()
}

// TestOrderHeldOutsideTheWindow checks that a held order waits for the window too, because a
// rollout must not drain the node. Nothing is downloaded twice for that.
func TestOrderHeldOutsideTheWindow(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{windowField}
	b.clock("02:00")
	b.give("hold")
	b.must()
	b.says(order.StateHeld, "")
	// The window closes while the machine waits for the order.
	b.clock("03:55")
	b.give("hold", "again=2")
	b.must()
	came := b.images.came
	b.clock("05:00")
	b.must()
	b.says(order.StateWaiting, "window")
	if step := b.answer().Step; step != order.StepWindow {
		t.Errorf("the step is %q, so a rollout would count the time", step)
	}
	b.give("again=2")
	b.must()
	b.says(order.StateWaiting, "window")
	if b.entry() || b.images.came != came {
		t.Errorf("outside the window: boot entry: %v, %d bytes came", b.entry(), b.images.came-came)
	}
	b.clock("02:00")
	b.must()
	b.updated()
}

// TestOrderWindowCloses checks that a window that is shorter than the download uses up no attempt:
// the next window continues.
func TestOrderWindowCloses(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{windowField}
	b.give("limit-rate=1k")
	days := 0
	for ; !b.entry() && days < 4*maxTries; days++ {
		b.clock("03:30")
		b.must()
		if b.entry() {
			break
		}
		b.says(order.StateWaiting, "window")
		if at := b.now.Sub(b.now.Truncate(24 * time.Hour)); at > 4*time.Hour+10*time.Minute {
			t.Fatalf("it worked until %s", b.now)
		}
	}
	if days < 1 {
		t.Errorf("it took %d windows", days+1)
	}
	b.updated()
}

// TestOrderWindowMetered checks that on a metered link the Node is read as soon as the window
// opens.
func TestOrderWindowMetered(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{"ipvs: {profile: metered}", windowField}
	b.give("max-bytes=20M")
	b.clock("01:50")
	b.must()
	b.says(order.StateWaiting, "window")
	b.clock("02:01")
	b.must()
	b.updated()
}

// TestOrderWindowClock checks that with a clock behind the image's date, the window counts as
// closed.
func TestOrderWindowClock(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{windowField}
	b.give()
	b.now = b.now.AddDate(0, 0, -2)
	b.clock("02:30")
	o := &orders{e: b.env()}
	var err error
	if o.image, err = site.ImageInfo(o.e); err != nil {
		t.Fatal(err)
	}
	o.active = site.IfAny(o.e, o.image)
	if err := o.closed(); err == nil || !strings.Contains(err.Error(), "the machine's clock is wrong") {
		t.Error(err)
	}
	b.now = b.now.AddDate(0, 0, 3)
	if err := o.closed(); err != nil {
		t.Error(err)
	}
}

// TestStickWindow checks that a stick with a new image waits for the window, and the console shows
// that.
func TestStickWindow(t *testing.T) {
	for image, taken := range map[string]bool{"later.raw.zst": true, "old.raw.zst": false} {
		b := newBox(t)
		b.put(ondisk.HealthyFile, "")
		b.plug("sda", image)
		b.clock("12:00")
		began := b.now
		e := b.env()
		b.site(e, windowField)
		if err := FromStick(t.Context(), e); err != nil || b.rebooted != taken {
			t.Errorf("%s: %v, restarted: %v", image, err, b.rebooted)
		}
		console := strings.Join(b.console, "\n")
		if strings.Contains(console, "the update window is closed") != taken || b.now.Sub(began) > 15*time.Hour || (b.now.Sub(began) > 13*time.Hour) != taken {
			t.Errorf("%s: after %s\n%s", image, b.now.Sub(began), console)
		}
	}
}

// TestWindowByHand checks that updates by a person ignore the window.
func TestWindowByHand(t *testing.T) {
	b := newBox(t)
	b.clock("12:00")
	e := b.env()
	b.site(e, windowField)
	if err := Update(t.Context(), e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {}); err != nil || !b.rebooted {
		t.Error(err)
	}
}
