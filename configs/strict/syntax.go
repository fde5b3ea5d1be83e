package strict

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

var (
	// yamlError matches syntax errors of package yaml.
	yamlError = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)
	// unknownAnchor matches an error that quotes the text after a *, which may be a part of a
	// passphrase.
	unknownAnchor = regexp.MustCompile(`unknown anchor '.*' referenced`)
)

// yamlHints maps messages of package yaml to the usual cause.
var yamlHints = map[string]string{
	"did not find expected key":                                    blockHint,
	"did not find expected '-' indicator":                          blockHint,
	"did not find expected <document start>":                       blockHint,
	"could not find expected ':'":                                  "a field's name needs a colon and a space after it; a line of a text (|) needs the indentation of the lines before it",
	"mapping values are not allowed in this context":               "the indentation is wrong, or a colon is missing in a line before it; a value that contains a colon and a space needs quotes",
	"found character that cannot start any token":                  "indent with spaces, not tabs; a value that begins with @, % or ` needs quotes",
	"found a tab character that violates indentation":              tabHint,
	"found a tab character where an indentation space is expected": tabHint,
	"found unexpected end of stream":                               quoteHint,
	"found unexpected document indicator":                          quoteHint,
	"did not find expected ',' or ']'":                             flowHint,
	"did not find expected ',' or '}'":                             flowHint,
}

const (
	blockHint = "check the indentation here and above, and that quotes and brackets are closed"
	tabHint   = "indent with spaces, not tabs"
	quoteHint = "a quote that begins in this line is not closed"
	flowHint  = "a [ or { is not closed, or a comma is missing"
)

// SyntaxProblem returns the Problem for an error of package yaml about data.
func SyntaxProblem(file string, data []byte, err error) Problem {
	p := Problem{File: file}
	m := yamlError.FindStringSubmatch(err.Error())
	if m == nil {
		p.Msg = atMost(maxMsg, err.Error())
		return p
	}
	p.Line, _ = strconv.Atoi(m[1])
	control := bytes.IndexFunc(data, func(r rune) bool { return unicode.IsControl(r) && !strings.ContainsRune("\t\r\n\u0085", r) })
	switch words := m[2]; {
	case unknownAnchor.MatchString(words):
		p.Line, p.Msg = max(p.Line, stoppedAt(data)), "not YAML: a value that begins with *, here or above, needs quotes"
	case !utf8.Valid(data):
		p.Line, p.Msg = LineOf(data, InvalidUTF8(data)), "is not UTF-8 text; save the file in this encoding"
	case control >= 0:
		r, _ := utf8.DecodeRune(data[control:])
		p.Line, p.Msg = LineOf(data, control), fmt.Sprintf("not YAML: contains the control character %U; remove it", r)
	default:
		hint := yamlHints[words]
		switch hint {
		case blockHint: // the parser reports the line in which the block begins
			p.Line = stoppedAt(data)
		case flowHint: // the parser counts from 0 in this case
			p.Line++
		}
		p.Msg = atMost(maxMsg, "not YAML: "+strings.TrimSuffix(words+": "+hint, ": "))
	}
	if len(data) > 0 {
		p.Line = max(p.Line, 1) // the parser reports no line for an error in the first line
	}
	return p
}

// LineOf returns the line that contains an offset. The first line is 1.
func LineOf(data []byte, offset int) int { return 1 + bytes.Count(data[:offset], []byte("\n")) }

// InvalidUTF8 returns the offset of the first invalid UTF-8 in data. If there is none, it returns
// len(data).
func InvalidUTF8(data []byte) int {
	for i, r := range string(data) {
		if r == utf8.RuneError && !bytes.HasPrefix(data[i:], []byte("\ufffd")) {
			return i
		}
	}
	return len(data)
}

// stoppedAt returns the last line with content that the parser reads before it fails.
func stoppedAt(data []byte) int {
	r := &byLine{lines: bytes.SplitAfter(data, []byte("\n"))}
	dec := yaml.NewDecoder(r)
	for err := error(nil); err == nil; {
		var n yaml.Node
		err = dec.Decode(&n)
	}
	for r.n > 1 {
		if text := bytes.TrimSpace(r.lines[r.n-1]); len(text) > 0 && text[0] != '#' {
			break
		}
		r.n--
	}
	return r.n
}

// byLine is a reader that returns at most one line per call.
type byLine struct {
	lines [][]byte
	n     int // number of lines that were read; the last one perhaps only in part
	rest  []byte
}

func (b *byLine) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		if b.n == len(b.lines) {
			return 0, io.EOF
		}
		b.rest = b.lines[b.n]
		b.n++
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}
