//go:build !linux

package main

// smallPages does nothing: only Linux has what it is about.
func smallPages() {}
