package configs

import "regexp"

// Patterns of values in documents.
var (
	sha256Hex    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	userName     = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	flagName     = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)
	octalMode    = regexp.MustCompile(`^0?[0-7]{3,4}$`)
	hashedPasswd = regexp.MustCompile(`^\$(1|2[abxy]|5|6|7|y|gy)\$[./0-9A-Za-z$=,]{8,}$`)
	wholeHash    = regexp.MustCompile(`^(\$1\$.*\$.{22}|\$2[abxy]\$[0-9]{2}\$.{53}|\$(5|7|y|gy)\$.*\$.{43}|\$6\$.*\$.{86})$`)
	ifacePattern = regexp.MustCompile(`^!?[A-Za-z0-9_.*?\[\]-]{1,31}$`)
	ifaceName    = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,15}$`)
	countryCode  = regexp.MustCompile(`^[A-Z]{2}$`)
	pskHex       = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)
	packageSpec  = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+|/[a-z0-9-]+)?( \[(amd64|arm64)\])?$`)
	moduleName   = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	sysctlKey    = regexp.MustCompile(`^[A-Za-z0-9_*-]+([./][A-Za-z0-9_*-]+)+$`)
	consoleForm  = regexp.MustCompile(`^(tty[A-Za-z0-9]*|hvc[0-9]+)(,[0-9]+[noe]?[78]?r?)?$`)
)
