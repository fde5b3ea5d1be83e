# Read by the initrd's init for boot=edgebake: it installs, and mounts no root.
# Messages are the program's.
mount_top() { :; }
mount_premount() { :; }
mountroot() {
	# klibc's insmod takes no compressed modules; kmod's is called by its name.
	ln -s /bin/kmod /edgebake/bin/insmod
	for m in /edgebake/modules/*; do
		[ ! -e "$m" ] || /edgebake/bin/insmod "$m" || true
	done
	case "$IP" in
	"" | none | off) ;;
	*) configure_networking ;;
	esac
	while :; do
		SSL_CERT_FILE=/edgebake/ca.crt PATH=/edgebake/bin:$PATH LD_LIBRARY_PATH=/edgebake/lib /edgebake/installer
		echo "edgebake: the installer ended; it is started again in 10 seconds" >/dev/console
		sleep 10
	done
}
