#!/usr/bin/env bash
# deps.sh installs what `make check` and the lab (test/e2e) need from the
# distribution; `deps.sh demo` only what `make demo` needs. It asks apt only for what is missing, starts no
# service of the machine, and prints nothing when there is nothing to do.
set -euo pipefail

packages=(
  containerd containernetworking-plugins iproute2 ipset iptables nftables procps runc util-linux # the lab
)
[[ ${1:-} == demo ]] || packages+=(
  gcc libc6-dev                      # the race detector
  dnsmasq-base kea-dhcp4-server # DHCP servers to lease from
  bird2 frr python3-exabgp # routers to speak BGP and BFD with
  buildah # a test builds the Dockerfile with it
  chromium-headless-shell fonts-dejavu-core # tests look at the dashboard with it
  arping conntrack curl iputils-ping ndisc6 tcpdump # tests look at the wire with them
  shellcheck
)

missing=()
for package in "${packages[@]}"; do
  # Docker's own package has these two programs, and excludes Debian's.
  if [[ $package == containerd || $package == runc ]] && command -v "$package" >/dev/null; then
    continue
  fi
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ $EUID -ne 0 ]]; then
  echo "deps.sh: as root, install: ${missing[*]}" >&2
  exit 1
fi

# A package that brings a service (containerd, Kea) asks policy-rc.d before it
# starts it: 101 means no.
guard=/usr/sbin/policy-rc.d
if [[ ! -e $guard ]]; then
  trap 'rm -f "$guard"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$guard"
  chmod 755 "$guard"
fi

echo "deps.sh: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends --no-remove "${missing[@]}" >/dev/null

# Nor shall it start with the machine: tests run their own, in namespaces.
for package in bird2 containerd frr kea-dhcp4-server; do
  if [[ -d /run/systemd/system && " ${missing[*]} " == *" $package "* ]]; then
    systemctl --quiet disable --now "${package/bird2/bird}.service"
  fi
done
