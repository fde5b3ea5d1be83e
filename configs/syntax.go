package configs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// yamlError is how package yaml words a syntax error.
var yamlError = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)

// unknownAnchor quotes what stands behind a *, which can be a passphrase
// that somebody forgot to put into quotes.
var unknownAnchor = regexp.MustCompile(`(?s)unknown anchor '(.*)' referenced`)

// What package yaml says, as far as more is known here than its words.
const (
	noKey         = "did not find expected key"
	noItem        = "did not find expected '-' indicator"
	noDocument    = "did not find expected <document start>"
	noNode        = "did not find expected node content"
	noColon       = "could not find expected ':'"
	noValues      = "mapping values are not allowed in this context"
	noToken       = "found character that cannot start any token"
	tabIndented   = "found a tab character that violates indentation"
	tabInText     = "found a tab character where an indentation space is expected"
	openAtEnd     = "found unexpected end of stream"
	openAtNext    = "found unexpected document indicator"
	noEndOfList   = "did not find expected ',' or ']'"
	noEndOfFields = "did not find expected ',' or '}'"
)

// syntaxProblem says what is wrong with a text that is not YAML, and names the line
// to edit. The parser often names another: where what it could not finish began, or
// the line before that.
func syntaxProblem(file string, data []byte, err error) Problem {
	p := Problem{File: file, Msg: atMost(maxMsg, err.Error())}
	at := func(i int) {
		p.Line = 1 + bytes.Count(data[:i], []byte("\n"))
		p.Col = i - bytes.LastIndexByte(data[:i], '\n')
	}
	if m := unknownAnchor.FindStringSubmatch(p.Msg); m != nil {
		if i := bytes.Index(data, []byte("*"+m[1])); i >= 0 {
			at(i)
		}
		p.Msg = "not YAML as it stands: a value that begins with * needs quotes"
		return p
	}
	if !utf8.Valid(data) {
		at(invalidUTF8(data))
		p.Msg = "is not UTF-8 text; save the file in this encoding"
		return p
	}
	if i := bytes.IndexFunc(data, func(r rune) bool { return unicode.IsControl(r) && !strings.ContainsRune("\t\r\n\u0085", r) }); i >= 0 {
		at(i)
		r, _ := utf8.DecodeRune(data[i:])
		p.Msg = fmt.Sprintf("not YAML: contains the control character %U; remove it", r)
		return p
	}
	line, words := parserWords(err)
	hint := ""
	if p.Line = line; len(data) > 0 {
		s := newSource(data)
		p.Line, p.Col, hint = s.locate(line, words)
		p.Line = min(p.Line, s.lines()) // not behind the end
	}
	switch {
	case hint == tabHint:
		p.Msg = "not YAML: " + hint
	case hint != "":
		p.Msg = "not YAML: " + words + ": " + hint
	default:
		p.Msg = "not YAML: " + words
	}
	return p
}

// parserWords takes an error of package yaml apart; line is 0 where it names none.
func parserWords(err error) (line int, words string) {
	m := yamlError.FindStringSubmatch(err.Error())
	if m == nil {
		return 0, err.Error()
	}
	line, _ = strconv.Atoi(m[1])
	return line, m[2]
}

// invalidUTF8 is where data stops being UTF-8.
func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n <= 1 {
			return i
		}
		i += n
	}
	return len(data)
}

// source is a text in lines, which count from 1.
type source struct {
	data []byte
	ends []int // of lines, where the next begins; ends[0] is 0
}

func newSource(data []byte) *source {
	s := &source{data: data, ends: []int{0}}
	for i, c := range data {
		if c == '\n' || i == len(data)-1 {
			s.ends = append(s.ends, i+1)
		}
	}
	return s
}

func (s *source) lines() int { return len(s.ends) - 1 }

func (s *source) line(n int) string {
	if n < 1 || n > s.lines() {
		return ""
	}
	return strings.TrimRight(string(s.data[s.ends[n-1]:s.ends[n]]), "\r\n")
}

// size is that of a line in bytes, its end included.
func (s *source) size(n int) int {
	if n < 1 || n > s.lines() {
		return 0
	}
	return s.ends[n] - s.ends[n-1]
}

func indent(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

// says reports whether a line has more than a comment.
func says(line string) bool {
	line = strings.TrimSpace(line)
	return line != "" && line[0] != '#'
}

// parse parses the first n lines, with others in place of what follows them.
func (s *source) parse(n int, then string) (line int, words string) {
	return parserWords(parseYAML(io.MultiReader(bytes.NewReader(s.data[:s.ends[n]]), strings.NewReader(then))))
}

func parseYAML(r io.Reader) error {
	dec := yaml.NewDecoder(r)
	for {
		var n yaml.Node
		if err := dec.Decode(&n); err != nil {
			return err
		}
	}
}

// byLine hands out one line at a time.
type byLine struct {
	s *source
	n int // lines that were handed out to their end
	i int
}

func (b *byLine) Read(p []byte) (int, error) {
	if b.n == b.s.lines() {
		return 0, io.EOF
	}
	end := b.s.ends[b.n+1]
	n := copy(p, b.s.data[b.i:end])
	if b.i += n; b.i == end {
		b.n++
	}
	return n, nil
}

// maxLookahead bounds how often a text is parsed to find a line.
const maxLookahead = 50

// failsAt is the first line with which the text fails in these words. The parser
// reads a line or two further before it fails.
func (s *source) failsAt(words string) int {
	r := &byLine{s: s}
	if err := parseYAML(r); errors.Is(err, io.EOF) {
		return 0
	}
	k, parsed := r.n, 0
	for n := k - 1; n >= 1 && parsed < maxLookahead; n-- {
		if n+1 != k && !says(s.line(n+1)) {
			continue
		}
		parsed++
		if _, said := s.parse(n, ""); said != words {
			break
		}
		k = n
	}
	for k > 1 && !says(s.line(k)) {
		k--
	}
	return k
}

const (
	tabHint   = "a tab where the line is indented; use spaces"
	colonHint = "a field's name needs a colon and a space behind it"
)

// twoColons is a line with a value that has a colon and a space in it.
var twoColons = regexp.MustCompile(`^[ -]*[^\s"'\[{#&*!|>][^:#]*:\s+[^"'\[{#&*!|>\s][^#]*:(\s|$)`)

// locate turns the parser's line and words into the line and column to edit (0: not
// known) and what to do there.
func (s *source) locate(line int, words string) (at, col int, hint string) {
	begin := func(n int) int { return indent(s.line(n)) + 1 }
	if words == noEndOfList || words == noEndOfFields {
		// This is where it begins; the parser counts from 0 here.
		return line + 1, 0, "a [ or { is not closed, or a comma is missing"
	}
	line = max(line, 1) // of the first it says nothing
	switch words {
	case tabInText:
		for n := line; n <= s.lines(); n++ {
			if text := strings.TrimLeft(s.line(n), " "); strings.HasPrefix(text, "\t") {
				return n, begin(n), tabHint
			}
		}
	case noToken, tabIndented:
		text := s.line(line)
		lead := text[:len(text)-len(strings.TrimLeft(text, " -\t"))]
		if tab := strings.IndexByte(lead, '\t'); tab >= 0 {
			return line, tab + 1, tabHint
		}
		for _, c := range []string{"@", "`", "%"} {
			if i := strings.Index(text, " "+c); i >= 0 {
				return line, i + 2, "a value that begins with " + c + " needs quotes"
			}
		}
	case openAtEnd, openAtNext:
		return line, 0, "a quote that begins in this line is not closed"
	case noColon:
		return line, begin(line), colonHint + "; a line of a text (|) needs the indentation of the lines before it"
	case noValues:
		return s.locateValue(line)
	case noNode:
		return s.failsAt(words), 0, ""
	case noDocument:
		n := 1
		for n < s.lines() && !says(s.line(n)) {
			n++
		}
		if indent(s.line(n)) > 0 {
			return n, 1, "the line is indented, and a later one is not: begin both in the same column"
		}
		return s.failsAt(words), 0, ""
	case noKey, noItem:
		return s.locateBlock(words)
	}
	return line, 0, ""
}

// locateValue finds the line to edit where the parser met a colon in a value.
func (s *source) locateValue(line int) (at, col int, hint string) {
	text := s.line(line)
	if twoColons.MatchString(text) {
		return line, 0, "a value that contains a colon and a space needs quotes"
	}
	// The first field of a block without its colon: what follows continues it.
	for n := line - 1; n >= 1; n-- {
		before := s.line(n)
		if !says(before) {
			continue
		}
		if indent(before) != indent(text) || strings.Contains(before, ":") || strings.HasPrefix(strings.TrimSpace(before), "-") {
			break
		}
		at = n
	}
	if at > 0 {
		return at, indent(s.line(at)) + 1, colonHint
	}
	return line, indent(text) + 1, "the line is indented as a part of the value before it: begin it in the column of the fields around it, or remove that value"
}

// locateBlock finds the line to edit where the parser missed a field or an item.
func (s *source) locateBlock(words string) (at, col int, hint string) {
	at = s.failsAt(words)
	if at == 0 {
		return 0, 0, ""
	}
	if at > 1 {
		if open, said := s.parse(at-1, ""); said == openAtEnd {
			return open, 0, fmt.Sprintf("a quote that begins in this line is closed in line %d only", at)
		}
	}
	text := s.line(at)
	col = indent(text) + 1
	stand := text[:indent(text)] + "x: 0\n"
	if item := strings.TrimSpace(text); item == "-" || strings.HasPrefix(item, "- ") {
		stand = text[:indent(text)] + "- 0\n"
	}
	if _, said := s.parse(at-1, stand); !slices.Contains([]string{noKey, noItem, noColon}, said) {
		return at, 0, "something stands behind a value in quotes or brackets that does not belong to it"
	}
	return at, col, fmt.Sprintf("what begins in column %d belongs to nothing above it: begin it where the fields or items around it begin", col)
}
