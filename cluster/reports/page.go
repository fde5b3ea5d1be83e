package reports

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ondisk"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

// order lists the results; machines that a person must look at come first.
var order = []string{ondisk.ResultFailed, ondisk.ResultWaiting, ondisk.ResultRunning, ondisk.ResultDone}

// row is one machine on the page.
type row struct {
	Summary
	Dots []bool // a dot for each phase, filled when it is reached
	Ago  string
}

// Page serves a page of all machines at /, and the same data as JSON at /reports.json. There is no
// authentication, so it must be served only on a loopback address.
func (s *Store) Page(now func() time.Time) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /reports.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(s.All()) // fails only if the browser is gone
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		h.Set("Cache-Control", "no-store")
		_ = page.Execute(w, view(s.All(), now())) // fails only if the browser is gone
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A foreign web page may point its own host name to this computer (DNS rebinding), so
		// accept only host names that no foreign page can have.
		if !ownName(r.Host) {
			http.Error(w, "open this page by an IP address or as localhost", http.StatusMisdirectedRequest)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func ownName(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = hostport
	}
	return host == "localhost" || net.ParseIP(strings.Trim(host, "[]")) != nil
}

type pageView struct {
	Counts []count
	Rows   []row
	At     string
	Calm   string // why nothing needs attention; empty if something does, or if there are no reports
}

type count struct {
	Result string
	N      int
}

func view(all []Summary, now time.Time) pageView {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b Summary) int { return Natural(a.Node, b.Node) })
	v := pageView{At: now.UTC().Format("15:04:05")}
	for _, result := range order {
		c := count{Result: result}
		for _, t := range all {
			if t.Result != result {
				continue
			}
			c.N++
			r := row{Summary: t, Ago: ago(now.Sub(t.Received)), Dots: make([]bool, t.Steps)}
			for i := range r.Dots {
				r.Dots[i] = i < t.Step
			}
			v.Rows = append(v.Rows, r)
		}
		v.Counts = append(v.Counts, c)
	}
	failed, waiting, running := v.Counts[0].N, v.Counts[1].N, v.Counts[2].N
	switch {
	case len(v.Rows) == 0 || failed+waiting > 0:
	case running > 0:
		v.Calm = "no machine has failed or is waiting."
	default:
		v.Calm = "all machines have joined."
	}
	return v
}

// Natural compares names, and numbers in them by value: shop-4 comes before shop-10.
func Natural(a, b string) int {
	for a != "" && b != "" {
		m, n := digits(a), digits(b)
		if m == 0 || n == 0 {
			if a[0] != b[0] {
				return cmp.Compare(a[0], b[0])
			}
			a, b = a[1:], b[1:]
			continue
		}
		x, y := strings.TrimLeft(a[:m], "0"), strings.TrimLeft(b[:n], "0")
		if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
			return c
		}
		a, b = a[m:], b[n:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits returns the number of digits at the beginning of s.
func digits(s string) int { return len(s) - len(strings.TrimLeft(s, "0123456789")) }

func ago(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", max(0, int(d.Seconds())))
	case d < time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// plain returns text without control characters, shortened to maxText.
func plain(text string) string { return plainTo(maxText, text) }

func plainTo(most int, text string) string {
	text = printable.Line(text)
	if r := []rune(text); len(r) > most {
		text = string(r[:most]) + "…"
	}
	return text
}
