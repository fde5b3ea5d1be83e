package media

import (
	"encoding/json"
	"os"
	"time"
)

// Record is one line in the log of flashed disks.
type Record struct {
	Time       time.Time `json:"time"`
	Device     string    `json:"device"`
	Model      string    `json:"model,omitempty"`
	Serial     string    `json:"serial,omitempty"`
	Size       int64     `json:"size"`
	Image      string    `json:"image"`
	Name       string    `json:"name"`
	Plan       string    `json:"plan"`
	Site       string    `json:"site,omitempty"`
	NodeName   string    `json:"nodeName,omitempty"`
	Seconds    float64   `json:"seconds"`
	Kubernetes string    `json:"kubernetes"`
	*Flashed
}

// AddTo appends the record to a log in one write, so that several programs can share the log.
func (r *Record) AddTo(f *os.File) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		return err
	}
	return f.Sync()
}
