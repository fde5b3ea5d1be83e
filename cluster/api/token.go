package api

import (
	"crypto/rand"
	"strings"
	"time"
)

// What makes a Secret a bootstrap token to the API server, and to kubeadm one
// that lets a node join.
const (
	TokenNamespace = "kube-system"
	TokenType      = "bootstrap.kubernetes.io/token"
	// NodeGroup is whom kubeadm lets ask for a node's certificate.
	NodeGroup = "system:bootstrappers:kubeadm:default-node-token"
)

// TokenSecretName is the Secret of the token with that id.
func TokenSecretName(id string) string { return tokenPrefix + id }

const tokenPrefix = "bootstrap-token-"

// TokenID is the id that the name of a token's Secret has.
func TokenID(secretName string) string { return strings.TrimPrefix(secretName, tokenPrefix) }

// NewToken draws a bootstrap token.
func NewToken() (id, secret string) {
	// rand.Text is base32 in capitals; tokens want lower case.
	return strings.ToLower(rand.Text())[:6], strings.ToLower(rand.Text())[:16]
}

// TokenData is the stringData of a token's Secret that lets a node join.
func TokenData(id, secret, description string, expires time.Time) map[string]string {
	return map[string]string{
		"token-id": id, "token-secret": secret, "expiration": expires.Format(time.RFC3339),
		"usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
		"auth-extra-groups": NodeGroup, "description": description,
	}
}

// tokenOwner begins the description of a token that edgebake made.
const tokenOwner = "edgebake"

// TokenDescription says whom a token of edgebake's is for; "": for any node.
func TokenDescription(node string) string {
	if node == "" {
		return tokenOwner
	}
	return tokenOwner + ": node " + node
}

// TokenNode is the node that a token of this description is for, if it names
// one.
func TokenNode(description string) (node string, ok bool) {
	return strings.CutPrefix(description, TokenDescription("")+": node ")
}
