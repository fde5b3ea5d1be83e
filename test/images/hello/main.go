// Command hello is the pod of the demo. It prints a greeting, and answers HTTP on port 8080 until
// it gets a signal. Every two seconds it also writes a greeting to the files in its arguments, for
// example a console. If its only argument is a URL, it prints the response from that URL and exits.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	host, err := os.Hostname()
	if err != nil {
		host = "somewhere"
	}
	if len(os.Args) == 2 && strings.HasPrefix(os.Args[1], "http://") {
		os.Exit(ask(os.Args[1]))
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
		// Do not block if the console has no peer.
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

func ask(url string) (code int) {
	client := http.Client{Timeout: 20 * time.Second}
	resp, err := client.Get(url)
	if err == nil {
		defer resp.Body.Close()
		_, err = io.Copy(os.Stdout, io.LimitReader(resp.Body, 1<<10))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hello:", err)
		return 1
	}
	return 0
}

func greet(w io.Writer, host string) {
	start := time.Now()
	for {
		fmt.Fprintf(w, "\r\nhello from %s, up %d s\r\n", host, int(time.Since(start).Seconds()))
		time.Sleep(2 * time.Second)
	}
}
