package installer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Settings contains the options that a person chooses for an installer.
type Settings struct {
	Disk      string // the rule that selects a machine's disk
	Then      string // ondisk.ThenPowerOff or ThenReboot, after the installation
	Reinstall bool   // overwrite a disk that has an edgebake image, once for each installer
}

// Check returns all errors of the settings. They name the flags.
func (s *Settings) Check() error {
	var errs []error
	_, err := device.ParseRule(s.Disk)
	for _, e := range joined.Errors(err) {
		errs = append(errs, fmt.Errorf("--disk: %w", e))
	}
	if s.Then != ondisk.ThenPowerOff && s.Then != ondisk.ThenReboot {
		errs = append(errs, fmt.Errorf("--then %q: want %s or %s", s.Then, ondisk.ThenPowerOff, ondisk.ThenReboot))
	}
	return errors.Join(errs...)
}

// Install returns the instructions for a new installer, which has a random ID.
func (s *Settings) Install() (ondisk.Install, error) {
	id := make([]byte, 16)
	_, err := rand.Read(id)
	return ondisk.Install{ID: hex.EncodeToString(id), Disk: s.Disk, Then: s.Then, Reinstall: s.Reinstall}, err
}

// Output is the kind and the destination of an installer.
type Output struct {
	ISO     string // file of the ISO image; empty for network boot
	Netboot string // directory for the files of network boot; empty for an ISO image
	URL     string // URL of that directory on a web server
	CACert  string // file with the CA certificates of that web server
	Force   bool   // replace existing files
}

// Check returns an error if the flags contradict each other.
func (o *Output) Check() error {
	switch {
	case o.ISO != "" && o.Netboot != "":
		return errors.New("--iso and --netboot cannot be given together")
	case o.ISO == "" && o.Netboot == "":
		return errors.New("no output is given: use --iso FILE or --netboot DIR")
	case (o.Netboot == "") != (o.URL == ""):
		return errors.New("--netboot DIR and --url URL must be given together: the installer reads the image from the URL")
	case o.CACert != "" && !strings.HasPrefix(o.URL, "https://"):
		return errors.New("--ca-cert applies only to a --url that begins with https://")
	case o.URL == "":
		return nil
	}
	u, err := url.Parse(o.URL)
	if err == nil && u.User != nil {
		// do not print the URL, which contains a password
		return errors.New("--url has a user name, which boot.img and the consoles would show to everybody on that network: remove it, and restrict the directory to the machines' network")
	}
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("--url %s: want the address of a directory, e.g. http://10.0.0.1/edge", o.URL)
	}
	return nil
}

// Files returns the paths of the output's files.
func (o *Output) Files() []string {
	if o.ISO != "" {
		return []string{o.ISO}
	}
	return []string{filepath.Join(o.Netboot, ondisk.InstallBootImage), filepath.Join(o.Netboot, ondisk.InstallImage)}
}

// Flag returns the flag that selects the output.
func (o *Output) Flag() string {
	if o.ISO != "" {
		return "--iso"
	}
	return "--netboot"
}

// Prepare creates the directory of the output, and rejects files that must not be replaced. undo
// removes the directory if it is empty.
func (o *Output) Prepare(image string) (undo func(), err error) {
	undo = func() {}
	if o.Netboot != "" {
		if undo, err = file.MakeDirectory(o.Netboot); err != nil {
			return func() {}, err
		}
	}
	var errs []error
	for _, f := range o.Files() {
		err := file.Check(f, o.Force)
		if err == nil && file.Same(f, image) {
			err = fmt.Errorf("%s is the image itself: name another file", f)
		}
		errs = append(errs, err)
	}
	return undo, errors.Join(errs...)
}

// ReadCA reads the file CACert. It returns nil if none is given.
func (o *Output) ReadCA() ([]byte, error) {
	if o.CACert == "" {
		return nil, nil
	}
	text, err := os.ReadFile(o.CACert)
	if err != nil {
		return nil, fmt.Errorf("--ca-cert: %w", err)
	}
	if err := forms.CheckCertificates(string(text)); err != nil {
		return nil, fmt.Errorf("--ca-cert: %s %w", o.CACert, err)
	}
	return text, nil
}

// Write writes the installer.
func (o *Output) Write(ctx context.Context, options Options, progress func(done, total int64)) error {
	if o.ISO != "" {
		return ISO(ctx, o.ISO, options, progress)
	}
	return Netboot(ctx, o.Netboot, strings.TrimRight(o.URL, "/")+"/"+ondisk.InstallImage, options, progress)
}
