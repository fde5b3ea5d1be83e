package machine

import (
	"bytes"
	"context"
	"fmt"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// SetHosts replaces the owner's lines in /etc/hosts, and keeps all others. It holds the lock of
// that file, which ipvscare also takes to write to it.
func (e *Env) SetHosts(ctx context.Context, owner string, entries ...siteconf.HostsEntry) error {
	unlock, err := e.Lock(ctx, ondisk.HostsLock)
	if err != nil {
		return fmt.Errorf("writing to /etc/hosts: %w", err)
	}
	defer unlock()
	old, _ := e.Read("/etc/hosts") // a missing file is created
	if _, err := e.Write("/etc/hosts", siteconf.EditHosts(old, owner, entries), Mode(0o644)); err != nil {
		return fmt.Errorf("writing to /etc/hosts: %w", err)
	}
	return nil
}

func (e *Env) HasHosts(owner string, entries ...siteconf.HostsEntry) bool {
	old, _ := e.Read("/etc/hosts")
	return bytes.Equal(siteconf.EditHosts(old, owner, entries), old)
}
