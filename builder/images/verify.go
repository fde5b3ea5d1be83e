package images

import "github.com/edgebake/edgebake/configs/ondisk/store"

// VerifyStore checks a baked store where it lies: see store.Verify.
func VerifyStore(f store.Files, root string, o Options) (*store.Summary, error) {
	snapshotter, err := o.snapshotter()
	if err != nil {
		return nil, err
	}
	return store.Verify(f, root, snapshotter)
}
