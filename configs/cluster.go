package configs

import (
	"net"
)

// apiServerPort is the port of the first API server: the endpoint's. A VIP can
// stand for API servers on different ports, but has only one itself.
func (s *Site) apiServerPort() string {
	_, port, err := net.SplitHostPort(s.Masters[0])
	if err != nil {
		panic("BUG: port of a Site that was not validated: " + err.Error())
	}
	return port
}

// EndpointHostPort is the endpoint as clients address it, "name:port"; of a
// valid Site.
func (s *Site) EndpointHostPort() string { return net.JoinHostPort(s.Endpoint, s.apiServerPort()) }

// EndpointURL is the endpoint as a kubeconfig names it; of a valid Site.
func (s *Site) EndpointURL() string { return "https://" + s.EndpointHostPort() }

// VIPHostPort is the virtual server's address, "10.103.97.2:6443"; of a
// valid Site.
func (s *Site) VIPHostPort() string { return net.JoinHostPort(s.VIP, s.apiServerPort()) }

// OpenYurt reports whether the node stands behind yurthub.
func (s *Site) OpenYurt() bool { return s.NodeType == NodeEdge || s.NodeType == NodeCloud }
