package clusterdoc

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"strings"

	"github.com/edgebake/edgebake/configs"
)

// minReportKey is the smallest length of a key. `edgebake cluster listen` generates keys of 26
// letters.
const minReportKey = 20

// ReportPath returns the path in the URL to which a node sends its reports (`edgebake cluster
// listen`). It consists of the node's name and a MAC of the name.
func ReportPath(key configs.Secret, node string) string {
	mac := hmac.New(sha256.New, []byte(key.Reveal()))
	mac.Write([]byte("edgebake report v1\n" + node))
	return "/" + node + "/" + hex.EncodeToString(mac.Sum(nil)[:16])
}

// of returns the field report for a node's Site.
func (r *Receiver) of(node string) configs.Report {
	out := configs.Report{URL: r.URL, CACert: r.CACert}
	if !r.Key.IsZero() && node != "" {
		out.URL = strings.TrimSuffix(r.URL, "/") + ReportPath(r.Key, node)
	}
	return out
}

// validate validates the field key, which the field report of a Site does not have.
func (r *Receiver) validate(probs *configs.Problems) {
	if r.Key.IsZero() {
		return
	}
	if len(r.Key.Reveal()) < minReportKey {
		probs.Add("report.key", "is shorter than %d letters; use the key that `edgebake cluster listen` prints", minReportKey)
	}
	u, err := url.Parse(r.URL)
	switch {
	case r.URL == "":
		probs.Add("report.key", "requires a receiver; name it in report.url")
	case err == nil && (strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != ""):
		probs.Add("report.url", "has a path, but with report.key each machine gets its own path; write %s://%s", u.Scheme, u.Host)
	}
}
