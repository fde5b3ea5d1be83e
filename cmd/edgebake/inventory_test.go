package main

const inventory = `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  masters: ["10.0.0.1:6443"]
  credentials: {token: abcdef.0123456789abcdef}
  caCertHashes: ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
sites:
  - {name: berlin, match: {serial: SN1}}
  - {name: paris, match: {macs: ["52:54:00:00:00:02"]}, credentials: {token: fedcba.fedcba9876543210}}
`
