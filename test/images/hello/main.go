// Command hello is the demo's pod: it greets, and answers HTTP on port 8080
// until it is told to end. Given a file, such as a console, it greets into it
// too, every two seconds.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
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
	for _, path := range os.Args[1:] {
		// A console that nobody is connected to must not hold us up.
		f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NOCTTY|syscall.O_NONBLOCK, 0)
		if err != nil {
			fmt.Fprintln(os.Stderr, "hello:", err)
			os.Exit(1)
		}
		go greet(f, host)
	}
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGINT, syscall.SIGTERM)
	<-sig
}

func greet(w io.Writer, host string) {
	start := time.Now()
	for {
		fmt.Fprintf(w, "\r\nhello from %s, up %d s\r\n", host, int(time.Since(start).Seconds()))
		time.Sleep(2 * time.Second)
	}
}
