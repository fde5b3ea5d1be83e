// Package siteconf renders the settings of a Site for one machine: an Ignition
// config with the operating system settings, kubeadm's JoinConfiguration, the
// configuration of ipvscare, and the lines of /etc/hosts. `edgebake render`
// prints them on the operator's computer and firstboot applies them on the
// node, with the same code.
//
// All functions are pure: they read no file, clock or network. The Site must be
// one that configs.ParseSite returned.
package siteconf
