package cluster

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/edgebake/edgebake/configs/printable"
)

// Client accesses a cluster with the rights of a kubeconfig's user.
type Client struct {
	config *rest.Config
	dyn    dynamic.Interface
}

// requestTimeout limits each request. It is short because an operator waits at a terminal.
const requestTimeout = 30 * time.Second

// Open returns a client for a context of a kubeconfig; it makes no request. An empty kubeconfig
// means the file that kubectl uses, an empty context the current one.
func Open(kubeconfig, context string) (*Client, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	loading := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context})
	config, err := loading.ClientConfig()
	switch {
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("reading the kubeconfig: %w", emptyConfig(rules.GetLoadingPrecedence(), loading, context))
	case err != nil:
		return nil, fmt.Errorf("reading the kubeconfig: %w", plainLoading(err))
	}
	config.Timeout = requestTimeout
	config.UserAgent = "edgebake"
	config.WarningHandler = rest.NoWarnings{} // deprecation warnings are for developers, not operators
	// A command sends many requests at once; client-go's default of 5 per second is too slow.
	config.QPS, config.Burst = 50, 100
	return newClient(config)
}

// emptyConfig replaces client-go's error that no API server is configured with the cause: all files
// are missing, or one of them is incomplete.
func emptyConfig(files []string, loading clientcmd.ClientConfig, context string) error {
	present := slices.DeleteFunc(slices.Clone(files), func(name string) bool { _, err := os.Stat(name); return errors.Is(err, fs.ErrNotExist) })
	if len(present) == 0 && os.Getenv(clientcmd.RecommendedConfigPathEnvVar) != "" {
		return fmt.Errorf("%s: no such file; correct $%s, or use --kubeconfig FILE", strings.Join(files, ", "), clientcmd.RecommendedConfigPathEnvVar)
	}
	if len(present) == 0 {
		return errors.New("none found; use --kubeconfig FILE, or set KUBECONFIG")
	}
	names := strings.Join(present, ", ")
	raw, err := loading.RawConfig()
	switch {
	case err != nil:
		return err
	case len(raw.Clusters) == 0:
		return fmt.Errorf("%s is not a kubeconfig: it has no cluster; name another file with --kubeconfig", names)
	case context == "" && raw.CurrentContext == "":
		return fmt.Errorf("%s has no current context; choose one with --context: %s", names, strings.Join(slices.Sorted(maps.Keys(raw.Contexts)), ", "))
	}
	return fmt.Errorf("%s has no API server in context %q; choose another with --context", names, cmp.Or(context, raw.CurrentContext))
}

var loadingFile = regexp.MustCompile(`error loading config file ("[^"]*")`)

// otherKind matches client-go's error for a file that is not a kubeconfig.
var otherKind = regexp.MustCompile(`no kind "[^"]*" is registered|couldn't get version/kind`)

// plainLoading shortens client-go's error for a file that is not a kubeconfig. Other errors
// are returned unchanged.
func plainLoading(err error) error {
	file := loadingFile.FindStringSubmatch(err.Error())
	if file == nil || !otherKind.MatchString(err.Error()) {
		return err
	}
	return fmt.Errorf("%s is not a kubeconfig; name another file with --kubeconfig", strings.Trim(file[1], `"`))
}

func newClient(config *rest.Config) (*Client, error) {
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	return &Client{config, dyn}, nil
}

// Server returns the URL of the API server in the kubeconfig.
func (c *Client) Server() string { return c.config.Host }

// as returns a client that uses a token instead of the operator's credentials.
func (c *Client) as(token string) (*Client, error) {
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token
	config.WarningHandler = rest.NoWarnings{}
	return newClient(config)
}

// Resources that this package reads and writes.
var (
	secrets             = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	configMaps          = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	nodes               = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	pods                = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	evictions           = schema.GroupVersionResource{Version: "v1", Resource: "pods/eviction"}
	services            = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	endpointSlices      = schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
	csrs                = schema.GroupVersionResource{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"}
	accessReviews       = schema.GroupVersionResource{Group: "authorization.k8s.io", Version: "v1", Resource: "selfsubjectaccessreviews"}
	daemonSets          = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "daemonsets"}
	deployments         = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	clusterRoles        = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}
	clusterRoleBindings = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings"}
	roles               = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"}
	roleBindings        = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"}
	crds                = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// resource returns the interface to a resource; without a namespace, the cluster-wide one.
func (c *Client) resource(r schema.GroupVersionResource, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return c.dyn.Resource(r)
	}
	return c.dyn.Resource(r).Namespace(namespace)
}

// get reads an object, or returns nil if it does not exist.
func (c *Client) get(ctx context.Context, r schema.GroupVersionResource, namespace, name string) (*unstructured.Unstructured, error) {
	obj, err := c.resource(r, namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return obj, c.explain("reading "+describe(r, namespace, name), err)
}

// list reads all objects that the options select, in one request.
func (c *Client) list(ctx context.Context, r schema.GroupVersionResource, namespace string, o metav1.ListOptions) ([]unstructured.Unstructured, error) {
	all, err := c.resource(r, namespace).List(ctx, o)
	if err != nil {
		return nil, c.explain("listing "+describe(r, namespace, ""), err)
	}
	return all.Items, nil
}

// describe returns the name of an object in the form that kubectl uses.
func describe(r schema.GroupVersionResource, namespace, name string) string {
	s := r.Resource
	if r.Group != "" {
		s += "." + r.Group
	}
	if name != "" {
		s += " " + name
	}
	if namespace != "" {
		s += " in namespace " + namespace
	}
	return s
}

// requestError is the error of a request.
type requestError struct {
	doing string // such as "reading nodes n1"
	text  string // what went wrong, and what to do about it
	err   error
}

func (r *requestError) Error() string { return r.doing + ": " + r.text }
func (r *requestError) Unwrap() error { return r.err }

// explain adds the meaning and the fix to the error of a request.
func (c *Client) explain(doing string, err error) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	var network net.Error
	var request *url.Error
	if errors.As(err, &request) {
		err = request.Err // without the URL: the message names server and object
	}
	text := ""
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled):
		return err
	case apierrors.IsUnauthorized(err):
		text = fmt.Sprintf("%s does not accept the kubeconfig's credentials: they have expired, or belong to another cluster", c.Server())
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "denied"): // by an admission webhook or policy
		text = fmt.Sprintf("the API server rejects it: %v", err)
	case apierrors.IsForbidden(err):
		text = fmt.Sprintf("the kubeconfig's user has no permission: %v", err)
	case errors.As(err, &unknown), errors.As(err, &host), errors.As(err, &invalid):
		// The error quotes names from an untrusted certificate: shorten them, without control characters.
		text = fmt.Sprintf("verifying the certificate of %s: %s; the kubeconfig belongs to another cluster, or the address to another server",
			c.Server(), printable.Short(err.Error(), 300))
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		text = fmt.Sprintf("%s does not answer: %v", c.Server(), err)
	case request != nil: // for example, the answer is truncated, or the server is not an API server
		text = fmt.Sprintf("request to %s failed: %v", c.Server(), err)
	default:
		text = err.Error()
	}
	return &requestError{doing, text, err}
}

// permission is an RBAC permission that a request needs.
type permission struct {
	verb      string
	resource  schema.GroupVersionResource
	namespace string
	name      string
}

func (r permission) String() string { return r.verb + " " + describe(r.resource, r.namespace, r.name) }

// missingPermissions returns the permissions that the client does not have.
func (c *Client) missingPermissions(ctx context.Context, rights []permission) ([]permission, error) {
	var lacks []permission
	for _, r := range rights {
		group := r.resource.Group
		resource, subresource, _ := strings.Cut(r.resource.Resource, "/")
		review := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
			"spec": map[string]any{"resourceAttributes": map[string]any{
				"verb": r.verb, "group": group, "resource": resource, "subresource": subresource, "namespace": r.namespace, "name": r.name,
			}},
		}}
		done, err := c.resource(accessReviews, "").Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return nil, c.explain("reading the permissions of the kubeconfig's user", err)
		}
		if allowed, _, _ := unstructured.NestedBool(done.Object, "status", "allowed"); !allowed {
			lacks = append(lacks, r)
		}
	}
	return lacks, nil
}

// requirePermissions returns an error that lists all missing permissions, or nil if there are none.
func (c *Client) requirePermissions(ctx context.Context, doing string, rights ...permission) error {
	lacks, err := c.missingPermissions(ctx, rights)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if len(lacks) == 0 {
		return nil
	}
	var names []string
	for _, r := range lacks {
		names = append(names, r.String())
	}
	return fmt.Errorf("%s: the kubeconfig's user has no permission to %s; nothing was changed; use an administrator's kubeconfig, or grant these permissions", doing, strings.Join(names, ", or "))
}
