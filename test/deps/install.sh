#!/usr/bin/env bash
# Installs the Debian packages that the demo and the tests call, where they
# are missing. A second run changes nothing and needs no root. Go is the one
# thing assumed.
#
#   install.sh demo [ARCH]  what `make demo` needs, ARCH=arm64 for that one's
#   install.sh packages     what `make packages` needs
#   install.sh              what the tests need besides
#   install.sh nightly      what `make nightly` needs besides
set -euo pipefail

# What the demo runs: mmdebstrap makes the base (uidmap lets it do so without
# root), QEMU boots it with OVMF's firmware.
packages=(ca-certificates debian-archive-keyring mmdebstrap uidmap qemu-system-x86 qemu-utils ovmf)
[ "${1:-}" != packages ] || packages=(ca-certificates debian-archive-keyring git mmdebstrap uidmap)
# The oracles that judge disks and units, and the network of the end-to-end
# tests.
case "${1:-}" in demo | packages) ;; *) packages+=(bmap-tools bsdutils chromium cpio cryptsetup-bin e2fsprogs dosfstools dnsmasq-base gdisk minisign mtools systemd iproute2 nftables openssh-client openssl zstd gcc libc6-dev libblkid-dev man-db passwd udev xorriso) ;; esac
[ "${1:-}" != nightly ] || packages+=(lintian)
# Packages of another architecture are set up in emulation; arch-test tells
# mmdebstrap that it works, QEMU boots what comes of it with AAVMF's firmware.
foreign=${2:-amd64}
[ "$foreign" != arm64 ] || packages+=(arch-test qemu-user-static qemu-system-arm qemu-efi-aarch64)

if ! command -v apt-get >/dev/null; then
	echo "This is not Debian or a relative of it. Install by your own means: ${packages[*]}" >&2
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

# Where systemd runs it tells the kernel to run arm64 programs by qemu-user;
# elsewhere, as in a container, it has to be told here.
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
