package member

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// ParseSigner parses a private key (PEM). Its errors do not contain the key.
func ParseSigner(text []byte) (crypto.Signer, error) {
	b, _ := pem.Decode(text)
	if b == nil {
		return nil, errors.New("it contains no private key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(b.Bytes)
	if err != nil {
		key, err = anyError(x509.ParseECPrivateKey(b.Bytes))
	}
	if err != nil {
		key, err = anyError(x509.ParsePKCS1PrivateKey(b.Bytes))
	}
	signer, ok := key.(crypto.Signer)
	if err != nil || !ok {
		return nil, errors.New("the private key is damaged")
	}
	return signer, nil
}

func anyError[T any](key T, err error) (any, error) { return key, err }

// KeysInPlace checks the cluster's keys on this machine. They are needed once the slot does not
// have them any more.
func KeysInPlace(e *machine.Env, site *configs.Site) error {
	var errs []error
	for _, ca := range configs.ClusterCAs() {
		if _, err := LoadPair(e, PKIDir+"/"+ca.Base+".crt", PKIDir+"/"+ca.Base+".key"); err != nil {
			errs = append(errs, fmt.Errorf("reading the cluster's keys (%s): %w", ca.Base, err))
		}
	}
	if _, err := ParseSigner(e.Contents(PKIDir + "/sa.key")); err != nil {
		errs = append(errs, fmt.Errorf("reading the service accounts' key: %w", err))
	}
	if len(errs) == 0 && !AnyPinned(e.Contents(ondisk.KubeCA), site.CAPins()) {
		errs = append(errs, errors.New("the cluster's CA on this machine is not the Site's"))
	}
	return errors.Join(errs...)
}
