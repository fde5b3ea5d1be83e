package cluster

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/edgebake/edgebake/firstboot/servercert"
)

// requestSubject returns the node named in the subject of a certificate request that was made with
// a bootstrap token.
func requestSubject(r *unstructured.Unstructured) string {
	text, _, _ := unstructured.NestedString(r.Object, "spec", "request")
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return ""
	}
	block, _ := pem.Decode(raw)
	if block == nil {
		return ""
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return ""
	}
	name, ok := strings.CutPrefix(request.Subject.CommonName, servercert.NodeUser)
	if !ok {
		return ""
	}
	return name
}
