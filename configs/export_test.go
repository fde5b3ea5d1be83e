package configs

// Patterns of fields for the schemas, which tests in package configs_test generate.
var (
	ConsoleForm   = consoleForm
	CountryCode   = countryCode
	CrictlVersion = crictlVersion
	FlagName      = flagName
	HashedPasswd  = hashedPasswd
	IfacePattern  = ifacePattern
	ImageName     = imageName
	ModuleName    = moduleName
	OctalMode     = octalMode
	PackageSpec   = packageSpec
	Sha256Hex     = sha256Hex
	SkipPhase     = skipPhase
	SuiteName     = suiteName
	SumName       = sumName
	UserName      = userName
)
