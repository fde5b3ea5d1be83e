// Hello is the program in the test images. Depending on its arguments, it prints a greeting, waits
// like a pause container, or lists a directory.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	args := append(os.Args, "", "")
	switch args[1] {
	case "pause":
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
		<-c
	case "list":
		err := filepath.WalkDir(args[2], func(p string, d fs.DirEntry, err error) error {
			if err == nil {
				fmt.Println(d.Type(), p)
			}
			return err
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	default:
		fmt.Println("hello from a baked image")
	}
}
