package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

type answers func(*http.Request) (*http.Response, error)

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) { return a(r) }

// TestImpatient checks that a response that stops fails exactly at the limit. A slow response, or a
// slow reader, must not fail.
func TestImpatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := answers(func(req *http.Request) (*http.Response, error) {
			r, w := io.Pipe()
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) }) // as for a connection
			go func() {
				for range 3 {
					time.Sleep(29 * time.Second)
					w.Write([]byte("slow"))
				}
			}()
			return &http.Response{StatusCode: http.StatusOK, Body: r}, nil
		})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://server.test/", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := WithStallTimeout(server, 30*time.Second).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		start := time.Now()
		first := make([]byte, 4)
		if _, err := io.ReadFull(resp.Body, first); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute) // the reader is slow, as with a full disk
		got, err := io.ReadAll(resp.Body)
		// Bytes that have arrived are read at once. The last ones arrive 29 s later.
		want := 29*time.Second + 10*time.Minute + 29*time.Second + 30*time.Second
		if d := time.Since(start); string(got) != "slowslow" || !errors.Is(err, ErrStalled) || !IsTimeout(err) || !IsBroken(err) || d != want {
			t.Errorf("%q, %v after %v, want %v", got, err, d, want)
		}
	})
}

// TestSend checks that sending fails at the limit if the server does not read the body. It must not
// fail if the server reads slowly or responds late.
func TestSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, tt := range map[string]struct {
			pause, answer time.Duration
			taken         int
			err           error
		}{
			"slow":        {29 * time.Second, 0, 3, nil},
			"late answer": {0, time.Hour, 3, nil},
			"stuck":       {31 * time.Second, 0, 1, ErrStalled},
		} {
			taken := 0
			body := &chunks{left: 3}
			start := time.Now()
			err := Send(t.Context(), body, 30*time.Second, func(ctx context.Context, body io.Reader) error {
				for {
					if _, err := body.Read(make([]byte, 1)); err != nil {
						break
					}
					taken++
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(tt.pause):
					}
				}
				time.Sleep(tt.answer)
				return nil
			})
			if !errors.Is(err, tt.err) || taken != tt.taken {
				t.Errorf("%s: %d taken, %v after %v", name, taken, err, time.Since(start))
			}
		}
		refused := errors.New("refused")
		if err := Send(t.Context(), &chunks{}, time.Second, func(context.Context, io.Reader) error { return refused }); err != refused {
			t.Error(err)
		}
	})
}

type chunks struct{ left int }

func (c *chunks) Read([]byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	c.left--
	return 1, nil
}

func TestRetry(t *testing.T) {
	passing, last := errors.New("passing"), errors.New("last")
	type attempt struct {
		brought bool
		err     error
	}
	fail, more := attempt{false, passing}, attempt{true, passing}
	for name, tt := range map[string]struct {
		retry    Retry
		attempts []attempt // the last one is repeated
		pauses   []time.Duration
		err      error
	}{
		"at once":      {Retry{Attempts: 3, Pause: 1}, []attempt{{}}, nil, nil},
		"later":        {Retry{Attempts: 3, Pause: 1}, []attempt{fail, fail, {}}, []time.Duration{1, 2}, nil},
		"never":        {Retry{Attempts: 3, Pause: 1}, []attempt{fail}, []time.Duration{1, 2}, passing},
		"for good":     {Retry{Attempts: 3, Pause: 1}, []attempt{fail, {false, fmt.Errorf("wrapped: %w", Final(last))}}, []time.Duration{1}, last},
		"brings some":  {Retry{Attempts: 3, Pause: 1}, []attempt{fail, fail, more, more, fail, {}}, []time.Duration{1, 2, 1, 1, 1}, nil},
		"some, never":  {Retry{Attempts: 2, Pause: 1}, []attempt{more, more, fail}, []time.Duration{1, 1, 1}, passing},
		"longest":      {Retry{Attempts: 6, Pause: 1, Longest: 3}, []attempt{fail}, []time.Duration{1, 2, 3, 3, 3}, passing},
		"asked":        {Retry{Attempts: 4, Pause: 1}, []attempt{{false, WithPause(passing, 7)}, fail, fail, {}}, []time.Duration{7, 14, 28}, nil},
		"asked less":   {Retry{Attempts: 3, Pause: 5}, []attempt{{false, WithPause(passing, 2)}, {}}, []time.Duration{5}, nil},
		"asked a year": {Retry{Attempts: 3, Pause: 5}, []attempt{{false, WithPause(passing, 365*24*time.Hour)}, {}}, []time.Duration{time.Minute}, nil},
	} {
		var pauses []time.Duration
		told := 0
		tt.retry.Sleep = func(_ context.Context, d time.Duration) error { pauses = append(pauses, d); return nil }
		tt.retry.Again = func(err error) {
			if told++; !errors.Is(err, passing) {
				t.Errorf("%s: told %v", name, err)
			}
		}
		n := 0
		err := tt.retry.Do(t.Context(), func() (bool, error) {
			a := tt.attempts[min(n, len(tt.attempts)-1)]
			n++
			return a.brought, a.err
		})
		if err != tt.err || !slices.Equal(pauses, tt.pauses) || told != len(pauses) {
			t.Errorf("%s: %v after %v, told %d times", name, err, pauses, told)
		}
	}
}

// TestEach checks that places are tried in turn, and a place with a final error only once.
func TestEach(t *testing.T) {
	passing, gone, hopeless := errors.New("passing"), errors.New("gone"), errors.New("hopeless")
	for name, tt := range map[string]struct {
		answers map[string]error // responses by place and round
		asked   string
		pauses  []time.Duration
		err     string
	}{
		"the first":     {map[string]error{}, "a1", nil, ""},
		"the second":    {map[string]error{"a1": passing}, "a1 b1", nil, ""},
		"in two rounds": {map[string]error{"a1": passing, "b1": Final(gone)}, "a1 b1 a2", []time.Duration{1}, ""},
		"none":          {map[string]error{"a1": Final(gone), "b1": Final(gone)}, "a1 b1", nil, "gone\ngone"},
		"never": {map[string]error{"a1": WithPause(passing, 5), "b1": Final(gone), "a2": passing, "a3": passing}, "a1 b1 a2 a3",
			[]time.Duration{5, 10}, "passing\ngone"},
		"hopeless": {map[string]error{"a1": Stop(hopeless)}, "a1", nil, "hopeless"},
	} {
		var asked []string
		var pauses []time.Duration
		rounds := [2]int{}
		r := Retry{Attempts: 3, Pause: 1, Sleep: func(_ context.Context, d time.Duration) error { pauses = append(pauses, d); return nil }}
		err := r.Each(t.Context(), 2, func(i int) error {
			rounds[i]++
			at := fmt.Sprint(string("ab"[i]), rounds[i])
			asked = append(asked, at)
			return tt.answers[at]
		})
		got := ""
		if err != nil {
			got = err.Error()
		}
		if strings.Join(asked, " ") != tt.asked || !slices.Equal(pauses, tt.pauses) || got != tt.err {
			t.Errorf("%s: asked %v, pauses %v, %q", name, asked, pauses, got)
		}
		if err := errors.Is(err, hopeless); err != (tt.err == "hopeless") {
			t.Errorf("%s: Stop's error is lost", name)
		}
	}
}

// TestRetryEnds checks that a canceled context ends the retries.
func TestRetryEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(90*time.Minute, cancel)
		start := time.Now()
		n := 0
		err := Retry{Attempts: 10, Pause: time.Hour}.Do(ctx, func() (bool, error) { n++; return false, errors.New("passing") })
		if d := time.Since(start); err != context.Canceled || n != 2 || d != 90*time.Minute {
			t.Errorf("%v after %v and %d attempts", err, d, n)
		}
		if err := (Retry{Attempts: 10}).Do(ctx, func() (bool, error) { return false, Final(io.EOF) }); err != context.Canceled {
			t.Error(err)
		}
	})
}

func TestRetryAfter(t *testing.T) {
	for said, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, "-1": 0, "soon": 0, "Fri, 31 Dec 1999 23:59:59 GMT": 0, "99999999999": time.Minute, "999999999999999999999": 0,
	} {
		resp := &http.Response{Header: http.Header{"Retry-After": {said}}}
		if got := RetryAfter(resp); got != want {
			t.Errorf("%q: %v, want %v", said, got, want)
		}
	}
}
