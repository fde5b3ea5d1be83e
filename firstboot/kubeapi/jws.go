package kubeapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// Path and keys of the ConfigMap cluster-info.
const (
	clusterInfoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	kubeconfigKey   = "kubeconfig"
	// SignaturePrefix followed by a token's ID is the key of the signature by that token.
	SignaturePrefix = "jws-kubeconfig-"
)

// SplitToken splits a bootstrap token, which must have the format that kubeadm prescribes.
func SplitToken(token string) (id, secret string, err error) {
	id, secret, ok := strings.Cut(token, ".")
	if !ok || len(id) != 6 || len(secret) != 16 || !lowerAlnum(id) || !lowerAlnum(secret) {
		return "", "", errors.New("reading the bootstrap token: it is not of the form abcdef.0123456789abcdef")
	}
	return id, secret, nil
}

func lowerAlnum(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			return false
		}
	}
	return true
}

// verifyJWS verifies the detached signature (RFC 7515, appendix F; HS256) of payload, made by
// the cluster's bootstrapsigner with the secret of the token id.
func verifyJWS(sig, payload, id, secret string) error {
	header, rest, ok := strings.Cut(sig, ".")
	if !ok {
		return errors.New("verifying cluster-info: its signature is not a JWS")
	}
	detached, mac, ok := strings.Cut(rest, ".")
	if !ok || detached != "" {
		return errors.New("verifying cluster-info: its signature must be a detached JWS, without a payload")
	}
	raw, err := base64.RawURLEncoding.DecodeString(header)
	if err != nil {
		return fmt.Errorf("verifying cluster-info: decoding the signature's header: %w", err)
	}
	var h struct {
		Alg  string   `json:"alg"`
		Kid  string   `json:"kid"`
		Crit []string `json:"crit"`
	}
	if err := json.Unmarshal(raw, &h); err != nil {
		return fmt.Errorf("verifying cluster-info: decoding the signature's header: %w", err)
	}
	if h.Alg != "HS256" || h.Kid != id || len(h.Crit) > 0 {
		return fmt.Errorf("verifying cluster-info: the signature is by %q with key %q, expected HS256 with key %q", h.Alg, h.Kid, id)
	}
	got, err := base64.RawURLEncoding.DecodeString(mac)
	if err != nil {
		return fmt.Errorf("verifying cluster-info: decoding the signature: %w", err)
	}
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte(header + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
	if !hmac.Equal(m.Sum(nil), got) {
		return ErrSignature
	}
	return nil
}

// CheckSignature returns an error if cluster-info is not signed with the token.
func CheckSignature(data map[string]string, token string) error {
	id, secret, err := SplitToken(token)
	if err != nil {
		return err
	}
	sig, ok := data[SignaturePrefix+id]
	if !ok {
		return errors.New("cluster-info has no signature for this token")
	}
	return verifyJWS(sig, data[kubeconfigKey], id, secret)
}
