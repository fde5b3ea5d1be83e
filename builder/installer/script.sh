# For boot=edgebake, the initrd's init reads this file. It runs the installer instead of mounting a
# root.
mount_top() { :; }
mount_premount() { :; }
mountroot() {
	# klibc's insmod takes no compressed modules. kmod does, if it is called as insmod.
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
