// Package siteconf renders the settings of a Site for one machine: an Ignition config for the
// operating system, kubeadm's JoinConfiguration, the configuration of ipvscare, and lines of
// /etc/hosts. `edgebake render` prints them, and firstboot applies them on the machine.
//
// No function reads the clock or the network. The only files read are those of an image, through
// [Root]. The Site must be the result of configs.ParseSite.
package siteconf
