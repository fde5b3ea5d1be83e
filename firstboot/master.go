package firstboot

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
)

// A control-plane node has the cluster's keys from its Site. None of them is
// the first: each runs kubeadm's init phases, and etcd starts only as the seat
// decision says (package seat).

const pkiDir = "/etc/kubernetes/pki"

// masterPhases are those behind the site, on a control-plane node.
func masterPhases(active *Active) []Phase {
	return []Phase{
		addressPhase(active.Site),  // etcd and the API server listen there
		clockPhase(active),         // before the first certificate is judged
		keysPhase(active),          // before anything is signed
		endpointPhase(active.Site), // before the first client of the own API server
		imagesPhase(),              // before kubelet wants them
		certificatesPhase(active),  // the seat decision asks with them
		seatPhase(active),          // before etcd can start, at each boot
		controlPlanePhase(active),  // kubelet, and with it the control plane
		continuedPhase(active),     // etcd's force-new-cluster is for one start
		publishPhase(active),       // what nodes join with; once in a cluster's life
		registerPhase(active),      // the Node is a control-plane node's
		forgetPhase(active),        // all that needs the Site's keys is done; Ready may wait for a network add-on
		againPhase(),               // certificates and snapshots are looked after while the machine is on
		snapshotPhase(active),
		manifestsPhase(active), // once; one of them may be what Ready waits for
		readyPhase(active),
	}
}

// ownHostPort is the machine's own API server.
func ownHostPort(site *configs.Site) string {
	_, port, err := net.SplitHostPort(site.Masters[0])
	if err != nil {
		panic("BUG: port of a Site that was not validated: " + err.Error())
	}
	return net.JoinHostPort(site.Self().Address, port)
}

// addressPhase sees that the machine has its own address: the other
// control-plane nodes know it by that.
func addressPhase(site *configs.Site) Phase {
	own := site.Self().Address
	has := func(ctx context.Context, e *Env) error {
		src, err := e.Source(ctx, ownHostPort(site))
		if err != nil {
			return fmt.Errorf("looking for the address %s on this machine: %w", own, plainNet(err))
		}
		if want, err := netip.ParseAddr(own); err != nil || src.Unmap() != want.Unmap() {
			return fmt.Errorf("this machine has not got its address %s (towards it, it would use %s)", own, src)
		}
		return nil
	}
	return Phase{
		Name: "network", Doc: "this machine's own address", Timeout: 4 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			addr, err := netip.ParseAddr(own)
			if err != nil || has(ctx, e) != nil || !e.hasHosts(nodeOwner, nodeLine(e, addr)) {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			addr, err := netip.ParseAddr(own)
			if err != nil {
				return err
			}
			e.Waiting("this machine's address %s", own)
			last, err := e.patiently(ctx, networkTime, 2*time.Second, func() error { return has(ctx, e) })
			if err == nil {
				err = last
			}
			if err != nil {
				return Advise(err, "check the cable, the switch port and the Site's network settings; where DHCP gives addresses, reserve this one for the machine")
			}
			return e.setHosts(ctx, nodeOwner, nodeLine(e, addr))
		},
	}
}

// endpointPhase maps the endpoint's name to this machine's own API server. No
// IPVS balances it here: controller manager, scheduler and kubelet of a
// control-plane node live and die with its own API server anyway.
func endpointPhase(site *configs.Site) Phase {
	line := node.HostsEntry{IP: site.Self().Address, Names: []string{site.Endpoint}}
	return Phase{
		Name: "endpoint", Doc: "the endpoint leads to this machine's own API server", Timeout: time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			if !e.hasHosts(endpointOwner, line) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error { return e.setHosts(ctx, endpointOwner, line) },
	}
}

// pkiFile is a file of what comes with the minted keys.
type pkiFile struct {
	path string
	data []byte
	mode Owner
}

// pkiFiles are what a control-plane node keeps of the cluster's keys.
func pkiFiles(k *configs.ClusterKeys) ([]pkiFile, error) {
	public, err := publicOf(k.ServiceAccount.Reveal())
	if err != nil {
		return nil, err
	}
	secret, open := Mode(0o600), Mode(0o644)
	var out []pkiFile
	for _, ca := range slices.Backward(configs.ClusterCAs()) { // by the first of them a machine is a cluster's
		out = append(out,
			pkiFile{pkiDir + "/" + ca.Base + ".key", []byte(ca.Of(k).Key.Reveal()), secret},
			pkiFile{pkiDir + "/" + ca.Base + ".crt", []byte(ca.Of(k).Cert), open})
	}
	out = append(out,
		pkiFile{pkiDir + "/sa.pub", public, open},
		pkiFile{pkiDir + "/sa.key", []byte(k.ServiceAccount.Reveal()), secret},
	)
	if !k.Manifests.IsZero() { // until they are applied
		out = append(out, pkiFile{clusterManifests, []byte(k.Manifests.Reveal()), secret})
	}
	return out, nil
}

// masterFiles are the keys of a control-plane node, and what is made with them.
func masterFiles() []string {
	files := append([]string{pkiDir + "/sa.key", pkiDir + "/sa.pub"}, masterConfs...)
	var bases []string
	for _, ca := range configs.ClusterCAs() {
		bases = append(bases, ca.Base)
	}
	for _, l := range leaves {
		bases = append(bases, l.base)
	}
	for _, base := range bases {
		files = append(files, pkiDir+"/"+base+".key", pkiDir+"/"+base+".crt")
	}
	return files
}

// publicOf is the public key of a private one, PEM both.
func publicOf(private string) ([]byte, error) {
	signer, err := parseSigner([]byte(private))
	if err != nil {
		return nil, fmt.Errorf("reading the key of the service accounts: %w", err)
	}
	der, err := x509.MarshalPKIXPublicKey(signer.Public())
	if err != nil {
		return nil, fmt.Errorf("reading the key of the service accounts: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// keysPhase puts the cluster's keys where kubeadm and the control plane look
// for them.
func keysPhase(active *Active) Phase {
	site := active.Site
	keys := site.Credentials.Keys
	return Phase{
		Name: "keys", Doc: "the cluster's keys are in place", Timeout: time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			if err := sameMaster(e, active); err != nil {
				return Todo, err
			}
			if keys == nil {
				if err := keysInPlace(e, site); err != nil {
					return Todo, Permanent(err, "stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
				}
				return Done, nil
			}
			files, err := pkiFiles(keys)
			if err != nil {
				return Todo, err
			}
			if slices.ContainsFunc(files, func(f pkiFile) bool { return string(e.contents(f.path)) != string(f.data) }) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(_ context.Context, e *Env) error {
			files, err := pkiFiles(keys)
			if err != nil {
				return err
			}
			for _, f := range files {
				if _, err := e.write(f.path, f.data, f.mode); err != nil {
					return fmt.Errorf("putting the cluster's keys in place: %w", err)
				}
			}
			return nil
		},
	}
}

// sameMaster makes sure that what the disk has of a cluster is of the site's,
// and this machine's.
func sameMaster(e *Env, active *Active) error {
	fix := "a control-plane node does not move: write the image to its disk again, or correct the Site"
	if c := active.Site.ControlPlane; c != nil && c.ContinueFrom == active.Node {
		fix = "a control-plane node does not move: correct the Site, and keep the disk, since the Site says to continue from this machine"
	}
	if ca := e.contents(ondisk.KubeCA); len(caPins(ca)) > 0 && !anyPinned(ca, active.Site.CAPins()) {
		return Permanent(errors.New("this machine has the CA of another cluster than the Site's"), fix)
	}
	if cert, err := enrolment(e); err == nil || errors.Is(err, errExpired) {
		return sameName(cert, active.Node)
	}
	return nil
}

// keysInPlace looks at keys whose copy in the slot is gone.
func keysInPlace(e *Env, site *configs.Site) error {
	var errs []error
	for _, ca := range configs.ClusterCAs() {
		if _, err := loadPair(e, pkiDir+"/"+ca.Base+".crt", pkiDir+"/"+ca.Base+".key"); err != nil {
			errs = append(errs, fmt.Errorf("reading the cluster's keys (%s): %w", ca.Base, err))
		}
	}
	if _, err := parseSigner(e.contents(pkiDir + "/sa.key")); err != nil {
		errs = append(errs, fmt.Errorf("reading the key of the service accounts: %w", err))
	}
	if len(errs) == 0 && !anyPinned(e.contents(ondisk.KubeCA), site.CAPins()) {
		errs = append(errs, errors.New("the cluster's CA on this machine is not the Site's"))
	}
	return errors.Join(errs...)
}
