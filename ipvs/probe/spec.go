package probe

// Spec says how an API server proves that it is alive.
type Spec struct {
	CAFile string // verifies API servers; until it exists nobody is verified
	// Unsafe accepts any certificate. Only a person may ask for it.
	Unsafe  bool
	Plain   bool   // HTTP without TLS
	Method  string // GET, HEAD, ...
	Path    string // begins with "/"
	Headers map[string]string
	Body    string
	// Status are HTTP statuses that count as healthy besides 200 to 399.
	Status []int
}

// CertName is a name that every kube-apiserver certificate carries. It lets
// a cluster whose certificate does not know the endpoint's name work too.
const CertName = "kubernetes"
