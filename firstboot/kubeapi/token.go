package kubeapi

import (
	"crypto/rand"
	"strings"
	"time"
)

// ControlPlaneLabel is a label of the Nodes of control-plane nodes.
const ControlPlaneLabel = "node-role.kubernetes.io/control-plane"

// Properties of a Secret that is a bootstrap token for nodes.
const (
	TokenNamespace = "kube-system"
	TokenType      = "bootstrap.kubernetes.io/token"
	// NodeGroup is the group that kubeadm allows to request a node's certificate.
	NodeGroup = "system:bootstrappers:kubeadm:default-node-token"
)

// TokenSecretName returns the name of the Secret of the token with this ID.
func TokenSecretName(id string) string { return tokenPrefix + id }

const tokenPrefix = "bootstrap-token-"

// TokenID returns the token's ID from the name of its Secret.
func TokenID(secretName string) string { return strings.TrimPrefix(secretName, tokenPrefix) }

// NewToken makes a random bootstrap token.
func NewToken() (id, secret string) {
	// rand.Text is upper-case base32; tokens are lower-case.
	return strings.ToLower(rand.Text())[:6], strings.ToLower(rand.Text())[:16]
}

// TokenData returns the stringData of a bootstrap token's Secret. Nodes can join with the token.
func TokenData(id, secret, description string, expires time.Time) map[string]string {
	return map[string]string{
		"token-id": id, "token-secret": secret, "expiration": expires.Format(time.RFC3339),
		"usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
		"auth-extra-groups": NodeGroup, "description": description,
	}
}

// tokenOwner begins the description of a token that edgebake made.
const tokenOwner = "edgebake"

// TokenDescription returns the description of a token for a node; an empty node means any node.
func TokenDescription(node string) string {
	if node == "" {
		return tokenOwner
	}
	return tokenOwner + ": node " + node
}

// TokenNode returns the node in a token's description. ok is false if the description names none.
func TokenNode(description string) (node string, ok bool) {
	return strings.CutPrefix(description, TokenDescription("")+": node ")
}
