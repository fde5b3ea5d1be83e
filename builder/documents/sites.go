package documents

import (
	"errors"
	"fmt"
	"os"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Sites reads a Site or an Inventory, with all other files for the slot.
func (r *Reader) Sites(name string) (media.Site, error) {
	d, err := r.ReadDecrypted(name)
	if err != nil {
		return media.Site{}, err
	}
	doc, err := configs.Read(name, d.Data)
	if err != nil {
		return media.Site{}, err
	}
	return r.sites(d, doc)
}

func (r *Reader) sites(d Source, doc *configs.Document) (media.Site, error) {
	token, forced, err := r.token()
	if err != nil {
		return media.Site{}, err
	}
	if doc.Kind == configs.KindInventory {
		inv, err := doc.Inventory(token, forced)
		if err != nil {
			return media.Site{}, explainToken(err)
		}
		return withoutTokens(r.inventory(d, inv))
	}
	site, err := doc.Site(token, forced)
	if err != nil {
		return media.Site{}, explainToken(err)
	}
	return withoutTokens(r.site(d, site))
}

// withoutTokens rejects a Site if another file of the slot also contains its token: the machine
// would not remove the token from that file.
func withoutTokens(s media.Site, err error) (media.Site, error) {
	if err == nil {
		err = s.TokensElsewhere().Err()
	}
	return s, err
}

func (r *Reader) site(d Source, site *configs.Site) (media.Site, error) {
	r.Warn(configs.LocateSite(d.Name, d.Data, site.Warnings()))
	if probs := site.Unreachable(); probs != nil && r.Ignition == "" {
		return media.Site{}, configs.LocateSite(d.Name, d.Data, probs)
	}
	out := media.Site{Doc: site, Files: map[string][]byte{}, Source: media.SiteSource{Name: d.Name, Data: d.Data, Ignition: r.Ignition}}
	if out.Source.Ignition == "" && site.IgnitionFile != "" {
		out.Source.Ignition = d.Path(site.IgnitionFile)
	}
	user, err := r.inlineFiles(d, site)
	if err != nil {
		return out, err
	}
	// Report errors of rendering now, to a person, instead of in firstboot.
	if _, err := render(d.Name, site, user); err != nil {
		return out, err
	}
	if user != nil {
		out.Files[ondisk.SlotIgnition] = user
	}
	site.IgnitionFile = "" // on the node, the config is in the slot
	return out, nil
}

// Rendered reads a Site and renders it as an Ignition config. It uses no facts about a machine.
func (r *Reader) Rendered(name string) ([]byte, error) {
	d, err := r.ReadDecrypted(name)
	if err != nil {
		return nil, err
	}
	site, err := configs.ParseSite(name, d.Data)
	if err != nil {
		return nil, err
	}
	user, err := r.inlineFiles(d, site)
	if err != nil {
		return nil, err
	}
	return render(name, site, user)
}

func render(name string, site *configs.Site, user []byte) ([]byte, error) {
	rendered, err := siteconf.Render(site, siteconf.Machine{}, user)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return rendered, nil
}

// inlineFiles reads the files that a Site names. It puts the certificate into the Site, and returns
// the Ignition config.
func (r *Reader) inlineFiles(d Source, site *configs.Site) (user []byte, err error) {
	caErr := inlineCA(d, site)
	name := r.Ignition
	if name == "" && site.IgnitionFile != "" {
		name = d.Path(site.IgnitionFile)
	}
	if name != "" {
		user, err = os.ReadFile(name)
		switch {
		case err == nil:
			err = r.checkIgnition(name, user)
		case r.Ignition != "":
			err = fmt.Errorf("--ignition: %w", err)
		default:
			err = configs.Problems{d.Problem("ignitionFile", err.Error())}
		}
	}
	if err := errors.Join(caErr, err); err != nil {
		return nil, err
	}
	return user, nil
}

// checkIgnition checks an Ignition config. Its errors name the user's file, which is config.ign on
// the node.
func (r *Reader) checkIgnition(name string, user []byte) error {
	_, warnings, problems := ignition.Parse(name, user)
	if problems != nil {
		return problems
	}
	r.Warn(warnings)
	return nil
}

// inlineCA puts the certificate from caFile into the Site, because the node does not have that
// file.
func inlineCA(d Source, site *configs.Site) error {
	if site.CAFile == "" {
		return nil
	}
	pem, err := os.ReadFile(d.Path(site.CAFile))
	if err == nil {
		site.CACert, site.CAFile = string(pem), ""
		probs := site.Validate()
		if len(probs) == 0 {
			return nil
		}
		err = errors.New(probs[0].Msg) // the Site was valid before
	}
	return configs.Problems{d.Problem("caFile", err.Error())}
}

func (r *Reader) inventory(d Source, inv *configs.Inventory) (media.Site, error) {
	r.Warn(configs.LocateInventory(d.Name, d.Data, inv.Warnings()))
	unreachable := make([]configs.Problems, len(inv.Sites))
	for i := range inv.Sites {
		unreachable[i] = inv.Sites[i].Site.Unreachable()
	}
	if probs := configs.LocateInventory(d.Name, d.Data, unreachable); probs != nil {
		return media.Site{}, probs
	}
	out := media.Site{Inventory: inv, Files: map[string][]byte{}, Source: media.SiteSource{Name: d.Name, Data: d.Data, Ignition: r.Ignition}}
	err := inv.InlineFiles(func(field, p string) (string, error) {
		b, err := os.ReadFile(d.Path(p))
		if err != nil {
			return "", configs.Problems{d.Problem(field, err.Error())}
		}
		return string(b), nil
	})
	if err != nil {
		return out, err
	}
	var user []byte
	if r.Ignition != "" {
		if user, err = os.ReadFile(r.Ignition); err != nil {
			return out, fmt.Errorf("--ignition: %w", err)
		}
		if err := r.checkIgnition(r.Ignition, user); err != nil {
			return out, err
		}
		out.Files[ondisk.SlotIgnition] = user
	}
	if err := checkEach(d, inv, user); err != nil {
		return out, err
	}
	return out, nil
}

// checkEach checks each Site of an Inventory: it must be possible to render it with the shared
// Ignition config, and it must fit into a slot.
func checkEach(d Source, inv *configs.Inventory, user []byte) error {
	var probs configs.Problems
	for i := range inv.Sites {
		_, err := siteconf.Config(&inv.Sites[i].Site, siteconf.Machine{}, user)
		for _, err := range []error{err, fitsSlot(&inv.Sites[i].Site)} {
			if err != nil {
				probs = append(probs, d.Problem(fmt.Sprintf("sites[%d]", i), err.Error()))
			}
		}
	}
	return probs.Err()
}

// fitsSlot rejects a Site of an Inventory that is too large for its machine's slot. Each Site
// repeats the defaults, which the Inventory contains only once.
func fitsSlot(site *configs.Site) error {
	b, err := configs.EncodeSlot(site)
	if err != nil {
		return err
	}
	if limit := slot.SizeLimit(ondisk.SlotSite); int64(len(b)) > limit {
		return fmt.Errorf("has %d bytes with its defaults, but a slot has space for a Site of at most %d bytes: move large contents of ignition (of the Site or in defaults) to the Image (files, overlays), or give all machines one Ignition config with --ignition", len(b), limit)
	}
	return nil
}
