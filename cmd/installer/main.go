// Command installer installs an image on the machine on which it runs; see package installer. It is
// started by the initrd of an installer.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"

	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/firstboot/console"
	"github.com/edgebake/edgebake/installer"
	"github.com/edgebake/edgebake/ondisk"
)

const about = `installer installs an image on the machine that it runs on, and overwrites disks
without being asked. It runs only in the initrd of an installer, which
edgebake flash --installer and edgebake installer make, and takes no arguments.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	say := func(line string) { console.Say(console.Active, "/dev", line) }
	code := run(ctx, ondisk.InstallConfig, os.Args[1:], say, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run installs an image as described by the file config, which exists only in an installer's
// initrd. say prints errors on the consoles, because nobody sees standard error there.
func run(ctx context.Context, config string, args []string, say func(string), stdout, stderr io.Writer) int {
	switch {
	case len(args) == 1 && (args[0] == "version" || args[0] == "--version"):
		fmt.Fprintln(stdout, "installer", version.OfSource())
		return 0
	case len(args) == 1 && (args[0] == "help" || args[0] == "--help" || args[0] == "-h"):
		fmt.Fprint(stdout, about)
		return 0
	case len(args) > 0:
		fmt.Fprintf(stderr, "installer: takes no arguments, got %q\n", args)
		return 2
	}
	c, err := installer.ReadConfig(config)
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(stderr, "installer: this program runs only in the initrd of an installer, which edgebake flash --installer makes: %s does not exist; nothing was changed\n", config)
	}
	if err == nil {
		err = installer.Run(ctx, c, installer.New(c))
	}
	if err != nil {
		say(fmt.Sprintf("FAILED: %v", err))
		return 1
	}
	return 0
}
