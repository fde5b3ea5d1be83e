package firstboot

import (
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// slotSecrets is what secretsInSlot found.
type slotSecrets int

const (
	noSecrets   slotSecrets = iota // of the active Site
	someSecrets                    // it has some
	slotBlank                      // it was cut off while they were forgotten
)

// secretsInSlot looks for secrets of the active Site in the slot. Another Site,
// stamped meanwhile, keeps its own: it needs them.
func secretsInSlot(e *machine.Env, active *Active) (slotSecrets, error) {
	dev, err := machine.OwnSlot(e)
	if err != nil {
		return noSecrets, err
	}
	c, one, err := readContents(e, dev)
	if errors.Is(err, slot.ErrBlank) {
		return slotBlank, nil
	}
	site, mac := active.Site, active.MAC
	if err == nil && !active.isMadeOf(one.Files[ondisk.SlotSite], one.Files[ondisk.SlotIgnition]) {
		if site, err = parseSite(one.Files[ondisk.SlotSite]); err == nil {
			mac, err = siteMAC(active.inputs.key, site, one.Files[ondisk.SlotIgnition])
		}
	}
	if err != nil {
		// A person's half-written correction is left for the person.
		e.Log.Warn("the slot cannot be read, and is left as it is", "error", err)
		return noSecrets, nil
	}
	if mac != active.MAC {
		e.Log.Info("the slot has another Site now, and is left as it is")
		return noSecrets, nil
	}
	if site.Credentials.IsZero() && !hasPKI(c) {
		return noSecrets, nil
	}
	return someSecrets, nil
}

// forgetToken leaves the Site in the slot, and no secret. A blank slot was cut off
// in the middle of this: what else was in it is gone.
func forgetToken(e *machine.Env, active *Active, blank bool) error {
	doc, err := withoutToken(active.Site)
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
		return fmt.Errorf("forgetting the token: %w", err)
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
