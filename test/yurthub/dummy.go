package main

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
)

// dummyInterface creates the interface through which pods reach the proxy.
func dummyInterface(name, ip string) error {
	if _, err := net.InterfaceByName(name); err != nil {
		if out, err := exec.Command("ip", "link", "add", name, "type", "dummy").CombinedOutput(); err != nil {
			return fmt.Errorf("making %s: %w: %s", name, err, out)
		}
	}
	out1, err1 := exec.Command("ip", "addr", "replace", ip+"/32", "dev", name).CombinedOutput()
	out2, err2 := exec.Command("ip", "link", "set", name, "up").CombinedOutput()
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("setting up %s: %w: %s%s", name, err, out1, out2)
	}
	return nil
}
