package reports

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ondisk"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

// order has what a person must look at first.
var order = []string{ondisk.ResultFailed, ondisk.ResultWaiting, ondisk.ResultRunning, ondisk.ResultDone}

// row is one machine on the page.
type row struct {
	Told
	Dots []bool // a dot for each phase, filled when it is reached
	Ago  string
}

// Page shows all machines, at /, and the same as JSON at /reports.json. It is
// meant for this computer's loopback: it asks nobody who they are.
func (s *Store) Page(now func() time.Time) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /reports.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(s.All()) // to a browser that may be gone
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		h.Set("Cache-Control", "no-store")
		_ = page.Execute(w, view(s.All(), now())) // as above
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A name that a foreign page had point to this computer is not asked
		// for by a person.
		if !ownName(r.Host) {
			http.Error(w, "ask for this page by an IP address or as localhost", http.StatusMisdirectedRequest)
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
}

type count struct {
	Result string
	N      int
}

func view(all []Told, now time.Time) pageView {
	v := pageView{At: now.UTC().Format("15:04:05")}
	for _, result := range order {
		c := count{Result: result}
		for _, t := range all {
			if t.Result != result {
				continue
			}
			c.N++
			r := row{Told: t, Ago: ago(now.Sub(t.Received)), Dots: make([]bool, t.Steps)}
			for i := range r.Dots {
				r.Dots[i] = i < t.Step
			}
			v.Rows = append(v.Rows, r)
		}
		v.Counts = append(v.Counts, c)
	}
	return v
}

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

// plain is a text without what terminals obey, and of bounded length.
func plain(text string) string { return plainTo(maxText, text) }

func plainTo(most int, text string) string {
	text = printable.Line(text)
	if r := []rune(text); len(r) > most {
		text = string(r[:most]) + "…"
	}
	return text
}
