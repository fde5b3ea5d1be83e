//go:build !linux

package main

// smallPages does nothing: only Linux has transparent huge pages.
func smallPages() {}
