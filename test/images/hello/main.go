// Command hello is the demo's pod: it greets, and answers HTTP on port 8080
// until it is told to end.
package main

import (
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	host, err := os.Hostname()
	if err != nil {
		host = "somewhere"
	}
	fmt.Println("hello from", host)
	go func() {
		err := http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, "hello from", host)
		}))
		fmt.Fprintln(os.Stderr, "hello:", err)
		os.Exit(1)
	}()
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGINT, syscall.SIGTERM)
	<-sig
}
