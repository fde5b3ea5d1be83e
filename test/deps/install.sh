#!/usr/bin/env bash
# Installs the missing Debian packages that the demo and the tests need. A second run
# changes nothing and does not need root. Go must already be installed.
#
#   install.sh demo [ARCH]  packages for `make demo`, or for `make demo ARCH=arm64`
#   install.sh packages     packages for `make packages`
#   install.sh              packages for the demo and the tests
#   install.sh nightly      packages for the demo, the tests and `make nightly`
set -euo pipefail

# For the demo: mmdebstrap makes the base (without root, thanks to uidmap), and QEMU boots
# it with OVMF's firmware.
packages=(ca-certificates debian-archive-keyring mmdebstrap uidmap qemu-system-x86 qemu-utils ovmf)
[ "${1:-}" != packages ] || packages=(ca-certificates debian-archive-keyring git mmdebstrap uidmap)
# For the oracles that check disks and units, and for the network of the end-to-end tests.
case "${1:-}" in demo | packages) ;; *) packages+=(bmap-tools bsdutils chromium cpio cryptsetup-bin e2fsprogs dosfstools dnsmasq-base gdisk minisign mtools systemd iproute2 nftables openssh-client openssl zstd gcc libc6-dev libblkid-dev man-db passwd udev xorriso) ;; esac
[ "${1:-}" != nightly ] || packages+=(lintian)
# Packages of another architecture are set up in emulation, which mmdebstrap checks with
# arch-test. QEMU boots the image with AAVMF's firmware.
foreign=${2:-amd64}
[ "$foreign" != arm64 ] || packages+=(arch-test qemu-user-static qemu-system-arm qemu-efi-aarch64)

if ! command -v apt-get >/dev/null; then
	echo "This is not Debian or a derivative. Install these packages yourself: ${packages[*]}" >&2
	exit 1
fi
if ! command -v go >/dev/null; then
	echo "There is no go command. Install Go $(sed -n 's/^go //p' "$(dirname "$0")/../../go.mod") or later first." >&2
	exit 1
fi

missing=()
for p in "${packages[@]}"; do
	status=$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)
	[ "$status" = installed ] || missing+=("$p")
done

# systemd makes the kernel run arm64 programs with qemu-user. Without systemd, as in a
# container, this script does.
registered() {
	[ "$foreign" != arm64 ] || [ "$(dpkg --print-architecture)" = arm64 ] || arch-test arm64 >/dev/null 2>&1
}
if [ ${#missing[@]} = 0 ] && registered; then
	exit 0
fi

sudo=(env DEBIAN_FRONTEND=noninteractive)
if [ "$(id -u)" != 0 ]; then
	if ! command -v sudo >/dev/null; then
		[ ${#missing[@]} = 0 ] || echo "As root, run: apt-get install ${missing[*]}" >&2
		registered || echo "As root, run: $0 $*" >&2
		exit 1
	fi
	sudo=(sudo DEBIAN_FRONTEND=noninteractive)
fi
if [ ${#missing[@]} != 0 ]; then
	echo "Installing ${missing[*]} (about a minute)"
	"${sudo[@]}" apt-get -q update
	"${sudo[@]}" apt-get -qy install --no-install-recommends "${missing[@]}"
fi
if ! registered; then
	binfmt=/proc/sys/fs/binfmt_misc
	[ -e $binfmt/register ] || "${sudo[@]}" mount -t binfmt_misc binfmt_misc $binfmt
	"${sudo[@]}" tee $binfmt/register </usr/lib/binfmt.d/qemu-aarch64.conf >/dev/null
fi
