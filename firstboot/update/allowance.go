package update

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk/update"
)

// allowance counts the bytes that an update downloads, and keeps their number below a limit.
type allowance struct {
	most  int64 // 0: no limit
	spent int64
	// reserved is the number that was last recorded. It includes the whole current request, so that
	// a power cut does not lose its bytes.
	reserved int64
	record   func(total int64) error // nil: nothing is recorded
	// hops is the number of redirects before the last response. Each one costs a request.
	hops int64
}

func newAllowance(o Options) *allowance {
	a := &allowance{most: o.MaxBytes, spent: o.Spent, reserved: o.Spent}
	if a.most > 0 {
		a.record = o.Record
	}
	return a
}

// piece returns the maximum number of bytes of a request. After a power cut a whole request counts,
// so it must be a small part of the limit.
func (a *allowance) piece() int64 {
	if a.most == 0 {
		return update.MaxSpan
	}
	return min(max(a.most/16, update.Tail), update.MaxSpan)
}

// cost returns the number of bytes that requests for these ranges cost.
func (a *allowance) cost(spans []update.Span) (n int64) {
	for _, s := range spans {
		size, piece := s.To-s.From, a.piece()
		n += size + (size+piece-1)/piece*a.each()
	}
	return n
}

// each returns the bytes that count for sending one request, with its redirects.
func (a *allowance) each() int64 { return (1 + a.hops) * update.RequestBytes }

var errLimit = errors.New("the update would fetch more than --max-bytes allows")

// request reserves the bytes of a request for n bytes. It returns an error if they exceed the
// limit.
func (a *allowance) request(n int64) error {
	n += a.each()
	if a.most > 0 && a.spent+n > a.most {
		return fmt.Errorf("%w: %s of %s have been fetched", errLimit, bytesize.MB(a.spent), bytesize.MB(a.most))
	}
	if a.record != nil && a.spent+n > a.reserved {
		if err := a.record(a.spent + n); err != nil {
			return err
		}
		a.reserved = a.spent + n
	}
	a.spent += update.RequestBytes
	return nil
}

// redirected counts the redirects that led to a response.
func (a *allowance) redirected(resp *http.Response) {
	a.hops = 0
	for r := resp.Request; r != nil && r.Response != nil; r = r.Response.Request {
		a.hops++
	}
	a.spent += a.hops * update.RequestBytes
}

// settle records the exact number of bytes.
func (a *allowance) settle() error {
	if a.record == nil || a.reserved == a.spent {
		return nil
	}
	a.reserved = a.spent
	return a.record(a.spent)
}

// countedBody is the body of a response. Its bytes count towards the allowance.
type countedBody struct {
	io.ReadCloser
	allow *allowance
	left  int64 // bytes of the response that have not been read
}

func (a *countedBody) Read(b []byte) (int, error) {
	n, err := a.ReadCloser.Read(b)
	a.allow.spent += int64(n)
	if a.left -= int64(n); err != nil {
		a.left = 0
	}
	return n, err
}

// Close also counts the unread rest of the response, because the server may have sent it already.
func (a *countedBody) Close() error {
	a.allow.spent += max(0, a.left)
	a.left = 0
	return a.ReadCloser.Close()
}
