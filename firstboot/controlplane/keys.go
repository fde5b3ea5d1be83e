package controlplane

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// pkiFile is a file made from the cluster's keys.
type pkiFile struct {
	Path string
	Data []byte
	mode machine.Owner
}

// pkiFiles returns the files with the cluster's keys on a control-plane node.
func pkiFiles(k *configs.ClusterKeys) ([]pkiFile, error) {
	public, err := publicOf(k.ServiceAccount.Reveal())
	if err != nil {
		return nil, err
	}
	secret, open := machine.Mode(0o600), machine.Mode(0o644)
	var out []pkiFile
	for _, ca := range slices.Backward(configs.ClusterCAs()) { // the cluster's CA, which comes first, is written last: it identifies the machine's cluster
		out = append(out,
			pkiFile{member.PKIDir + "/" + ca.Base + ".key", []byte(ca.Of(k).Key.Reveal()), secret},
			pkiFile{member.PKIDir + "/" + ca.Base + ".crt", []byte(ca.Of(k).Cert), open})
	}
	out = append(out,
		pkiFile{member.PKIDir + "/sa.pub", public, open},
		pkiFile{member.PKIDir + "/sa.key", []byte(k.ServiceAccount.Reveal()), secret},
	)
	if !k.Manifests.IsZero() { // stored until they are applied
		out = append(out, pkiFile{ClusterManifests, []byte(k.Manifests.Reveal()), secret})
	}
	return out, nil
}

const (
	etcdCA = member.PKIDir + "/etcd/ca.crt"
	// etcdFormerCA exists if etcd's CA has changed since etcd started and read it.
	etcdFormerCA = ondisk.RunMark + "etcd-former-ca"
)

// PKIFilesFor is like pkiFiles, but keeps a CA on the disk that is newer than the Site's. If the
// clock is synchronized, it also keeps the current CA while the Site's is not valid yet.
func PKIFilesFor(ctx context.Context, e *machine.Env, k *configs.ClusterKeys) ([]pkiFile, error) {
	files, err := pkiFiles(k)
	for i, f := range files {
		if !strings.HasSuffix(f.Path, ".crt") {
			continue
		}
		has := e.Contents(f.Path)
		early := kubeapi.Supersedes(f.Data, has) && kubeapi.Reissued(has, f.Data, e.Now()) == nil
		if early {
			synced, err := e.ClockSynced(ctx)
			early = err == nil && synced
		}
		if early {
			e.Note("the Site's %s is not valid yet: this machine keeps its previous one. To fix: correct the clock of the computer that ran `edgebake cluster new`, run it again, and stamp the Site again", path.Base(f.Path))
		}
		if early || kubeapi.Supersedes(has, f.Data) {
			files[i].Data = has
		}
	}
	return files, err
}

// Files lists the keys of a control-plane node, and the files that are made from them.
func Files() []string {
	files := append([]string{member.PKIDir + "/sa.key", member.PKIDir + "/sa.pub"}, Confs...)
	var bases []string
	for _, ca := range configs.ClusterCAs() {
		bases = append(bases, ca.Base)
	}
	for _, l := range Leaves {
		bases = append(bases, l.Base)
	}
	for _, base := range bases {
		files = append(files, member.PKIDir+"/"+base+".key", member.PKIDir+"/"+base+".crt")
	}
	return files
}

// publicOf returns the public key of a private key, both in PEM format.
func publicOf(private string) ([]byte, error) {
	signer, err := member.ParseSigner([]byte(private))
	if err != nil {
		return nil, fmt.Errorf("reading the service accounts' key: %w", err)
	}
	der, err := x509.MarshalPKIXPublicKey(signer.Public())
	if err != nil {
		return nil, fmt.Errorf("reading the service accounts' key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// KeysPhase puts the cluster's keys where kubeadm and the control plane expect them.
func KeysPhase(active *site.Active) run.Phase {
	keys := active.Site.Credentials.Keys
	return run.Phase{
		Name: "keys", Doc: "the cluster's keys are in place", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if err := DiskIsOfSite(e, active); err != nil {
				return run.Todo, err
			}
			if e.Exists(etcdFormerCA) {
				e.Note("etcd on this machine still uses the old certificate of its CA, which was reissued. To fix: restart the machine; restart control-plane nodes one at a time")
			}
			if keys == nil {
				if err := member.KeysInPlace(e, active.Site); err != nil {
					return run.Todo, run.NeedsPerson(err, "stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
				}
				return run.Done, nil
			}
			files, err := PKIFilesFor(ctx, e, keys)
			if err != nil {
				return run.Todo, err
			}
			if slices.ContainsFunc(files, func(f pkiFile) bool { return string(e.Contents(f.Path)) != string(f.Data) }) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			files, err := PKIFilesFor(ctx, e, keys)
			if err != nil {
				return err
			}
			if ca := e.Contents(etcdCA); Decided(e) && ca != nil && slices.ContainsFunc(files, func(f pkiFile) bool { return f.Path == etcdCA && string(f.Data) != string(ca) }) {
				if err := e.WriteFile(etcdFormerCA, nil, machine.Mode(0o600)); err != nil {
					return fmt.Errorf("recording that etcd still uses its old CA: %w", err)
				}
			}
			for _, f := range files {
				if _, err := e.Write(f.Path, f.Data, f.mode); err != nil {
					return fmt.Errorf("writing the cluster's keys: %w", err)
				}
			}
			return nil
		},
	}
}

// DiskIsOfSite returns an error if the disk has the CA of another cluster, or the certificate of
// another node, than the Site.
func DiskIsOfSite(e *machine.Env, active *site.Active) error {
	fix := member.Rewriting(e, "a control-plane node cannot move to another cluster: correct the Site, or write the image to the machine's disk again")
	if c := active.Site.ControlPlane; c != nil && c.ContinueFrom == active.Node {
		fix = "a control-plane node cannot move to another cluster: correct the Site, and keep the disk, since continueFrom in the Site names this machine"
	}
	if ca := e.Contents(ondisk.KubeCA); len(member.CAPins(ca)) > 0 && !member.AnyPinned(ca, active.Site.CAPins()) {
		return run.NeedsPerson(errors.New("this machine has the CA of another cluster than the Site's"), fix)
	}
	if cert, err := member.Enrolment(e); err == nil || member.OutOfTime(err) {
		return member.SameName(cert, active.Node, fix)
	}
	return nil
}
