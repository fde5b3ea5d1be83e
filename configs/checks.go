package configs

import "github.com/edgebake/edgebake/configs/strict"

var checks = strict.Checks{}
