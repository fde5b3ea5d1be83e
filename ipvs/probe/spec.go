package probe

// Spec defines the request and answers that prove that an API server is alive.
type Spec struct {
	CAFile string // the API servers' CA; until the file exists, no server is verified
	// Unsafe accepts any certificate. Only a person may set it.
	Unsafe  bool
	Plain   bool   // HTTP without TLS
	Method  string // GET, HEAD, ...
	Path    string // begins with "/"
	Headers map[string]string
	Body    string
	// Status lists HTTP statuses that count as healthy, in addition to 200 to
	// 399.
	Status []int
}

// CertName is a name in every kube-apiserver certificate. It is accepted so that clusters whose
// certificates lack the endpoint's name work too.
const CertName = "kubernetes"
