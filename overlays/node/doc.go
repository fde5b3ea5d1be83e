// Package node renders what a Site means on one machine: the Ignition config
// of its operating-system settings, kubeadm's JoinConfiguration, the document
// ipvscare reads, the lines of /etc/hosts. `edgebake render` prints them on the
// operator's computer and firstboot applies them on the node, by the same code.
//
// Everything here is a pure function of its arguments: no file is read, no
// clock, no network. The Site must be one that configs.ParseSite returned.
package node
