package site

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// SlotCredentials is the result of CredentialsInSlot.
type SlotCredentials int

const (
	NoCredentials   SlotCredentials = iota // none of the active Site, as far as the slot's contents are valid
	SomeCredentials                        // the slot has some credentials
	SlotBlank                              // removing them was interrupted
)

// CredentialsInSlot looks for credentials of the active Site in the slot: its token, its keys and
// the files in pki/. It returns NoCredentials if another Site was stamped meanwhile, or if the
// contents of the slot are invalid: then the slot is not changed. If the disk cannot read the slot,
// it returns an error.
func CredentialsInSlot(e *machine.Env, active *Active) (SlotCredentials, error) {
	dev, err := machine.OwnSlot(e)
	if err != nil {
		return NoCredentials, err
	}
	c, f, err := readContents(e, dev, active)
	if errors.Is(err, slot.ErrBlank) {
		return SlotBlank, nil
	}
	if err := SecretsUnreadable(err); err != nil {
		return NoCredentials, err
	}
	site, mac := active.Site, active.MAC
	if err == nil && f.site != active.Site {
		doc, ign := f.contents.Files[ondisk.SlotSite], f.contents.Files[ondisk.SlotIgnition]
		if site = f.site; site == nil {
			_, err = Parse(doc)
		} else if !active.isMadeOf(doc, ign) {
			mac, err = siteMAC(active.inputs.key, site, ign)
		}
	}
	if err != nil {
		// Keep a person's half-written correction.
		e.Log.Warn("the contents of the slot are invalid, and are not changed", "error", err)
		return NoCredentials, nil
	}
	if mac != active.MAC {
		e.Log.Info("the slot has another Site now, and is not changed")
		return NoCredentials, nil
	}
	if site.Credentials.IsZero() && !hasPKI(c) {
		return NoCredentials, nil
	}
	return SomeCredentials, nil
}

// SecretsUnreadable returns the error of a removal of secrets, with advice, if err shows that the
// disk failed to read the slot. It returns nil if only the contents of the slot are invalid, or err
// is nil.
func SecretsUnreadable(err error) error {
	if !errors.As(err, new(*fs.PathError)) {
		return nil
	}
	return run.Advise(fmt.Errorf("removing the secrets from the slot: %w", err),
		"the slot may still contain the bootstrap token: if the error persists (see `journalctl -k`), revoke the token (`kubeadm token delete`) and replace the disk")
}

// RemoveCredentials rewrites the slot with the Site, but without its token, its keys and the files
// in pki/. blank means that an interrupted attempt has left the slot blank.
func RemoveCredentials(e *machine.Env, active *Active, blank bool) error {
	doc, err := withoutCredentials(active.Site)
	if err != nil {
		return err
	}
	var secrets []string
	if token := active.Site.Credentials.Token.Reveal(); token != "" {
		secrets = append(secrets, token)
	}
	info := ondisk.SlotInfo{Version: ondisk.SlotInfoVersion, Plan: active.Image.Plan}
	if blank {
		info.Stamped = active.Stamped
		c := slot.Contents{Info: info, Files: map[string][]byte{ondisk.SlotSite: doc}}
		if active.ignition != nil {
			c.Files[ondisk.SlotIgnition] = slot.Hide(active.ignition, secrets...)
		}
		if err := e.WriteSlot(active.Device, &c); err != nil {
			return fmt.Errorf("writing the Site to the slot again: %w", err)
		}
		return nil
	}
	if err := e.ScrubSlot(active.Device, info, doc, secrets); err != nil {
		return fmt.Errorf("removing the secrets from the slot: %w", err)
	}
	return nil
}

func hasPKI(c *slot.Contents) bool {
	for name := range c.Files {
		if strings.HasPrefix(name, ondisk.SlotPKIDir+"/") {
			return true
		}
	}
	return false
}
