// Package siteconf renders the settings of a Site for one machine: an Ignition config for the
// operating system, kubeadm's JoinConfiguration, the configuration of ipvscare, and lines of
// /etc/hosts. `edgebake render` prints them, and firstboot applies them on the machine.
//
// All functions are pure: they read no file, clock or network. The Site must be the result of
// configs.ParseSite.
package siteconf
