package servercert

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"strings"
	"testing"
	"unicode"
)

func TestCheck(t *testing.T) {
	for _, tc := range []struct {
		subject pkix.Name
		node    bool
	}{
		{pkix.Name{CommonName: "kube-apiserver"}, false},
		{pkix.Name{CommonName: "kubernetes", Organization: []string{"system:masters"}}, false},
		{pkix.Name{}, false},
		{pkix.Name{CommonName: "system:node:edge-1", Organization: []string{"system:nodes"}}, true},
		{pkix.Name{CommonName: "system:node:edge-1"}, true},
		{pkix.Name{CommonName: "edge-1", Organization: []string{"openyurt:yurthub", "system:nodes"}}, true},
		{pkix.Name{CommonName: "system:node:\x1b[2J" + strings.Repeat("n", 1000)}, true},
	} {
		err := Check(&x509.Certificate{Subject: tc.subject})
		if errors.Is(err, ErrNode) != tc.node || err != nil && (len(err.Error()) > 200 || strings.ContainsFunc(err.Error(), unicode.IsControl)) {
			t.Errorf("%q: %v", tc.subject, err)
		}
	}
}
