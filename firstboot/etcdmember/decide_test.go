package etcdmember

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func peers(states ...PeerState) []Peer {
	var out []Peer
	for i, s := range states {
		out = append(out, Peer{Name: fmt.Sprintf("m%d", i+2), State: s, Permit: "today"})
	}
	return out
}

func members(text string) []Member {
	var out []Member
	for i, name := range strings.Fields(text) {
		name, learner := strings.CutSuffix(name, "+")
		out = append(out, Member{ID: fmt.Sprint(i + 1), Name: name, PeerURLs: []string{"https://" + name + ":2380"}, Learner: learner})
	}
	return out
}

// unstarted is an added learner whose etcd has not started.
var unstarted = Member{ID: "9", PeerURLs: []string{"https://m3:2380"}, Learner: true}

// TestTable tests every row of the decision table, and cases close to it.
func TestTable(t *testing.T) {
	for name, tt := range map[string]struct {
		v    View
		want string
	}{
		"data":                               {View{Disk: Disk{WAL: true}}, "start"},
		"data, whatever peers show":          {View{Disk: Disk{WAL: true}, Peers: peers(InUse, Blank)}, "start"},
		"data of a learner":                  {View{Disk: Disk{WAL: true}, Quorum: true, Members: members("m1+ m2 m3")}, "start"},
		"data, another is learner":           {View{Disk: Disk{WAL: true}, Quorum: true, Members: members("m1 m2+ m3")}, "start"},
		"data of another cluster":            {View{Disk: Disk{WAL: true, Cluster: "other"}, Quorum: true, Members: members("m1 m2 m3")}, "stop"},
		"another's, continue here":           {View{Disk: Disk{WAL: true, Cluster: "other"}, Request: Request{ContinueFrom: "m1"}}, "stop"},
		"data that nobody noted":             {View{Disk: Disk{WAL: true, Cluster: "none"}}, "stop"},
		"not noted, continue here":           {View{Disk: Disk{WAL: true, Cluster: "none"}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m1"}}, "stop"},
		"not noted, continued here":          {View{Disk: Disk{WAL: true, Cluster: "none", Continued: true}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m1"}}, "stop"},
		"not noted, restore here":            {View{Disk: Disk{WAL: true, Cluster: "none"}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m1", Restore: true}}, "set-aside"},
		"data, others are bootstrapped anew": {View{Disk: Disk{WAL: true, Member: "1", Etcd: "7"}, Quorum: true, Members: members("m1 m2 m3"), Etcd: "8"}, "stop"},
		"data, same etcd":                    {View{Disk: Disk{WAL: true, Member: "1", Etcd: "7"}, Quorum: true, Members: members("m1 m2 m3"), Etcd: "7"}, "start"},
		"data, name was added anew":          {View{Disk: Disk{WAL: true, Member: "9"}, Quorum: true, Members: members("m1 m2 m3")}, "stop"},
		"data, name is learner anew":         {View{Disk: Disk{WAL: true, Member: "9"}, Quorum: true, Members: members("m1+ m2 m3")}, "stop"},
		"blank, one is absent":               {View{Peers: peers(Blank, Silent), Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "bootstrap"},
		"blank, another is absent":           {View{Peers: peers(Silent, Silent), Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "wait"},
		"blank, absent, no permit":           {View{Peers: peers(Blank, Silent), Request: Request{Absent: []string{"m3"}}}, "stop"},
		"blank, absent one answers":          {View{Peers: peers(Blank, Blank), Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "stop"},
		"blank, absent one has lived":        {View{Peers: peers(Blank, InUse), Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "stop"},
		"blank, absent itself":               {View{Peers: peers(Leaderless, Leaderless), Permit: ValidPermit, Request: Request{Absent: []string{"m1"}}}, "wait"},
		"blank, absent itself, joins":        {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m2 m3"), Request: Request{Absent: []string{"m1"}}}, "join"},
		"continue there, old member":         {View{Disk: Disk{WAL: true, Member: "9"}, Peers: peers(InUse, Blank), Quorum: true, Members: members("m2 m1"), Request: Request{ContinueFrom: "m2"}}, "set-aside"},
		"restore here, blank":                {View{Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1", Restore: true}}, "restore"},
		"restore here, old data":             {View{Disk: Disk{WAL: true}, Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1", Restore: true}}, "set-aside"},
		"restore here, done":                 {View{Disk: Disk{WAL: true, Continued: true}, Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1", Restore: true}}, "start"},
		"restore here, quorum lives":         {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m2 m3"), Request: Request{ContinueFrom: "m1", Restore: true}}, "join"},
		"restored before, blank":             {View{Peers: peers(Silent, Silent), Request: Request{ContinueFrom: "m1", Restore: true, Restored: true}}, "stop"},
		"restored before, data":              {View{Disk: Disk{WAL: true}, Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1", Restore: true, Restored: true}}, "start"},
		"restored before, not noted":         {View{Disk: Disk{WAL: true, Cluster: "none"}, Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1", Restore: true, Restored: true}}, "stop"},
		"restored before, others live":       {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m2 m3"), Request: Request{ContinueFrom: "m1", Restore: true, Restored: true}}, "join"},
		"restore there, not yet":             {View{Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m2", Restore: true}}, "wait"},
		"restore there, old data":            {View{Disk: Disk{WAL: true, Member: "7", Etcd: "7"}, Peers: peers(InUse, Blank), Quorum: true, Members: members("m2"), Etcd: "8", Request: Request{ContinueFrom: "m2", Restore: true}}, "set-aside"},
		"blank, member lives":                {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m1 m2 m3"), Former: Alive}, "stop"},
		"blank, member is watched":           {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m1 m2 m3"), Former: Watched, FormerWhy: "a minute"}, "wait"},
		"blank, quorum":                      {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m1 m2 m3")}, "join remove 1"},
		"blank, quorum, member is gone":      {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m2 m3")}, "join"},
		"blank, quorum, half joined":         {View{Peers: peers(InUse, InUse), Quorum: true, Members: append(members("m2 m3"), Member{ID: "9", PeerURLs: []string{"https://m1:2380"}, Learner: true})}, "join remove 9"},
		"blank, another joins":               {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m1 m2 m3+")}, "wait"},
		"blank, dead learner":                {View{Peers: peers(InUse, InUse), Quorum: true, Members: append(members("m1 m2"), unstarted), DeadLearner: "9"}, "join remove 1 9"},
		"blank, learner not started":         {View{Peers: peers(InUse, InUse), Quorum: true, Members: append(members("m1 m2"), unstarted)}, "wait"},
		"blank, another learner":             {View{Peers: peers(InUse, InUse), Quorum: true, Members: append(members("m1 m2"), unstarted), DeadLearner: "8"}, "wait"},
		"dead learner, member lives":         {View{Peers: peers(InUse, InUse), Quorum: true, Members: append(members("m1 m2"), unstarted), DeadLearner: "9", Former: Alive}, "stop"},
		"blank, lived without quorum":        {View{Peers: peers(InUse, Silent), Permit: ValidPermit}, "stop"},
		"blank, lived beside blank":          {View{Peers: peers(Blank, InUse), Permit: ValidPermit}, "stop"},
		"blank, all blank":                   {View{Peers: peers(Blank, Blank), Permit: ValidPermit}, "bootstrap"},
		"blank, other permit":                {View{Peers: []Peer{{"m2", Blank, "today"}, {"m3", Blank, "yesterday"}}, Permit: ValidPermit}, "wait"},
		"blank, unknown permit":              {View{Peers: []Peer{{"m2", Blank, "today"}, {"m3", Blank, ""}}, Permit: ValidPermit}, "wait"},
		"blank, one has used it":             {View{Peers: peers(Blank, Spent), Permit: ValidPermit}, "wait"},
		"blank, other permit, absent":        {View{Peers: []Peer{{"m2", Blank, "today"}, {"m3", Silent, ""}}, Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "bootstrap"},
		"blank, spent is absent":             {View{Peers: peers(Blank, Spent), Permit: ValidPermit, Request: Request{Absent: []string{"m3"}}}, "stop"},
		"blank, bootstrapping beside blank":  {View{Peers: []Peer{{"m2", Leaderless, ""}, {"m3", Blank, "today"}}, Permit: ValidPermit}, "bootstrap"},
		"used up, one is silent":             {View{Peers: peers(Silent, Blank), Permit: UsedPermit}, "wait"},
		"spent beside a quorum":              {View{Peers: peers(InUse, Spent), Quorum: true, Members: members("m1 m2 m3")}, "join remove 1"},
		"spent beside one that lived":        {View{Peers: peers(InUse, Spent), Permit: ValidPermit}, "stop"},
		"restore there, spent":               {View{Peers: peers(Spent, Blank), Request: Request{ContinueFrom: "m2", Restore: true}}, "wait"},
		"blank, bootstrapping":               {View{Peers: peers(Leaderless, Blank), Permit: ValidPermit}, "bootstrap"},
		"blank, all reflashed":               {View{Peers: peers(Blank, Blank), Permit: ExpiredPermit}, "stop"},
		"blank, permit is used up":           {View{Peers: peers(Blank, Blank), Permit: UsedPermit}, "stop"},
		"sole, permit is used up":            {View{Permit: UsedPermit}, "stop"},
		"permit is used up, joins":           {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m2 m3"), Permit: UsedPermit}, "join"},
		"blank, no permit":                   {View{Peers: peers(Blank, Blank)}, "stop"},
		"blank, one silent":                  {View{Peers: peers(Blank, Silent), Permit: ValidPermit}, "wait"},
		"blank, bootstrapping, one silent":   {View{Peers: peers(Leaderless, Silent), Permit: ValidPermit}, "wait"},
		"sole, permit":                       {View{Permit: ValidPermit}, "bootstrap"},
		"sole, expired":                      {View{Permit: ExpiredPermit}, "stop"},
		"sole, no permit":                    {View{}, "stop"},
		"two masters, other lived":           {View{Peers: peers(InUse), Permit: ValidPermit}, "stop"},
		"continue here":                      {View{Disk: Disk{WAL: true}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m1"}}, "force-new-cluster"},
		"continue here, done":                {View{Disk: Disk{WAL: true, Continued: true}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m1"}}, "start"},
		"continue here, blank":               {View{Peers: peers(Silent, InUse), Request: Request{ContinueFrom: "m1"}, Permit: ValidPermit}, "stop"},
		"continue here, reflashed":           {View{Peers: peers(InUse, InUse), Quorum: true, Members: members("m1 m2 m3"), Request: Request{ContinueFrom: "m1"}}, "join remove 1"},
		"continue here, quorum lives":        {View{Disk: Disk{WAL: true}, Quorum: true, Members: members("m1 m2"), Request: Request{ContinueFrom: "m1"}}, "start"},
		"continue here, lives without":       {View{Disk: Disk{WAL: true}, Quorum: true, Members: members("m2 m3"), Request: Request{ContinueFrom: "m1"}}, "stop"},
		"continue there, not yet":            {View{Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m2"}, Permit: ValidPermit}, "wait"},
		"continue there, data":               {View{Disk: Disk{WAL: true}, Peers: peers(Silent, Blank), Request: Request{ContinueFrom: "m2"}}, "wait"},
		"continue there, joins":              {View{Peers: peers(InUse, Blank), Quorum: true, Members: members("m2"), Request: Request{ContinueFrom: "m2"}}, "join"},
		"continue there, old data":           {View{Disk: Disk{WAL: true}, Peers: peers(InUse, Blank), Quorum: true, Members: members("m2"), Request: Request{ContinueFrom: "m2"}}, "set-aside"},
		"continue there, joined":             {View{Disk: Disk{WAL: true}, Peers: peers(InUse, Blank), Quorum: true, Members: members("m2 m1"), Request: Request{ContinueFrom: "m2"}}, "start"},
		"continued there, power cut":         {View{Disk: Disk{WAL: true, Continued: true}, Peers: peers(InUse, Silent), Counted: true, Request: Request{ContinueFrom: "m2"}}, "start"},
		"continued there, not counted":       {View{Disk: Disk{WAL: true, Continued: true}, Peers: peers(InUse, Silent), Request: Request{ContinueFrom: "m2"}}, "wait"},
		"counted, but has not joined":        {View{Disk: Disk{WAL: true}, Peers: peers(InUse, Silent), Counted: true, Request: Request{ContinueFrom: "m2"}}, "wait"},
		"continued there, dropped":           {View{Disk: Disk{WAL: true, Member: "9", Continued: true}, Peers: peers(InUse, Silent), Quorum: true, Members: members("m2"), Request: Request{ContinueFrom: "m2"}}, "set-aside"},
		"continued there, not noted":         {View{Disk: Disk{WAL: true, Cluster: "none", Continued: true}, Peers: peers(InUse, Silent), Counted: true, Request: Request{ContinueFrom: "m2"}}, "stop"},
		"continue from a stranger":           {View{Disk: Disk{WAL: true}, Peers: peers(InUse, Blank), Request: Request{ContinueFrom: "m9"}}, "stop"},
	} {
		tt.v.Self, tt.v.PeerURL, tt.v.Cluster, tt.v.PermitID = "m1", "https://m1:2380", "shops", "today"
		switch tt.v.Disk.Cluster {
		case "":
			tt.v.Disk.Cluster = "shops"
		case "none":
			tt.v.Disk.Cluster = ""
		}
		d := Decide(tt.v)
		got := d.Do.String()
		if len(d.Remove) > 0 {
			got += " remove " + strings.Join(d.Remove, " ")
		}
		if got != tt.want || d.Why == "" || d.Do == Stop && d.Fix == "" {
			t.Errorf("%s: %s (%s; %s), want %s", name, got, d.Why, d.Fix, tt.want)
		}
	}
}

// writesImage matches a fix that overwrites the disk.
var writesImage = regexp.MustCompile(`write the image|flash`)

// TestNeverTwice checks many views of three control-plane nodes. For example, an empty etcd is
// never started if another one is running or may have data.
func TestNeverTwice(t *testing.T) {
	n, bootstraps := 0, 0
	states := []PeerState{Silent, Blank, Leaderless, InUse, Spent}
	for _, a := range states {
		for _, b := range states {
			for _, permit := range []Permit{NoPermit, ValidPermit, ExpiredPermit, UsedPermit} {
				for bits := range 1 << 11 {
					for _, from := range []string{"", "m1", "m2", "m9"} {
						v := View{Self: "m1", PeerURL: "https://m1:2380", Peers: peers(a, b), Permit: permit, Request: Request{ContinueFrom: from, Restore: bits&2 > 0},
							Disk: Disk{WAL: bits&1 > 0, Continued: bits&4 > 0}, Quorum: bits&8 > 0, Cluster: "shops", PermitID: "today"}
						if bits&1024 > 0 {
							v.Peers[1].Permit = "yesterday"
						}
						v.Disk.Cluster = []string{"shops", "other", "", "shops"}[bits>>5&3]
						if bits&128 > 0 {
							v.Former, v.Disk.Member = Alive, "9"
						}
						v.Counted = bits&256 > 0
						v.Request.Restored = bits&512 > 0 && v.Request.Restore && from == "m1"
						if v.Quorum {
							v.Members = members("m1 m2 m3")
							if bits&16 > 0 {
								v.Members = members("m2 m3")
							}
						}
						n++
						d := Decide(v)
						if v.Disk.WAL && v.Disk.Cluster == "other" && d.Do != Stop {
							t.Errorf("%s with another cluster's data, with %+v", d.Do, v)
						}
						if v.Disk.WAL && v.Disk.Cluster == "" && d.Do != Stop && d.Do != Wait && d.Do != SetAside {
							t.Errorf("%s although the data has no record, with %+v", d.Do, v)
						}
						if only := from == "m1" || v.Disk.Cluster == "" && !v.Quorum; v.Disk.WAL && only && writesImage.MatchString(d.Fix) {
							t.Errorf("the fix overwrites what may be the only copy (%s), with %+v", d.Fix, v)
						}
						alive := v.Quorum || a == InUse || b == InUse
						switch d.Do {
						case Bootstrap:
							bootstraps++
							if v.Disk.WAL || alive || a == Silent || b == Silent || a == Spent || b == Spent || b == Blank && bits&1024 > 0 || permit != ValidPermit || from != "" {
								t.Errorf("an empty etcd is bootstrapped with %+v", v)
							}
						case ForceNewCluster:
							if !v.Disk.WAL || from != "m1" || v.Request.Restore || v.Quorum {
								t.Errorf("etcd is started with --force-new-cluster with %+v", v)
							}
						case Restore:
							if v.Disk.WAL || from != "m1" || !v.Request.Restore || v.Request.Restored || v.Quorum {
								t.Errorf("a snapshot is restored with %+v", v)
							}
						case Join:
							if !v.Quorum || v.Disk.WAL || v.Former == Alive {
								t.Errorf("the node joins with %+v", v)
							}
							for _, m := range v.Members {
								if m.Name != "m1" && slices.Contains(d.Remove, m.ID) {
									t.Errorf("member %s is removed with %+v", m.Name, v)
								}
							}
						case SetAside:
							if !v.Disk.WAL || from == "" || v.Request.Restored {
								t.Errorf("data is moved aside without a request, with %+v", v)
							}
						case Start:
							if from == "m2" && !v.Quorum && !(v.Counted && v.Disk.Continued) {
								t.Errorf("etcd starts although continueFrom names another node, with %+v", v)
							}
							if v.Quorum && v.Disk.Member == "9" {
								t.Errorf("a member that the quorum does not list starts with %+v", v)
							}
							if !v.Disk.WAL {
								t.Errorf("etcd starts without data with %+v", v)
							}
						}
					}
				}
			}
		}
	}
	if bootstraps == 0 {
		t.Errorf("none of %d views leads to a bootstrap", n)
	}
}
