from __future__ import annotations

import gc

import fsspec
import pytest

pytest.register_assert_rewrite("tests.contracts.store_contract")

from storage import FeatureStore  # noqa: E402
from storage.backends import LocalBackend, MemoryBackend, RemoteBackend, ShardCache  # noqa: E402
from tests.contracts.store_contract import StoreContract, fill  # noqa: E402
from tests.contracts.web_server import serving  # noqa: E402


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return fill(FeatureStore.create(LocalBackend(tmp_path / "store")))


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return fill(FeatureStore.create(MemoryBackend(str(tmp_path))))

    def test_one_name_is_one_store_for_as_long_as_somebody_looks(self):
        store = FeatureStore.create(MemoryBackend("one name"))
        store.append([{"key": "a", "blob": b"1"}])
        again = FeatureStore.open(MemoryBackend("one name"))
        assert len(again) == 1 and len(store) == 0
        del store, again
        gc.collect()
        with pytest.raises(FileNotFoundError, match="no store of this name"):
            FeatureStore.open(MemoryBackend("one name"))


class TestNetworkFolder(StoreContract):
    """A folder on what looks like a network file system."""

    @pytest.fixture
    def store(self, tmp_path, network_folder):
        return fill(FeatureStore.create(tmp_path / "store", allow_network_fs=True))


@pytest.fixture
def network_folder(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 1 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("storage.backends.network.MOUNTS", mounts)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store in a folder, only to be read."""
    return fill(FeatureStore.create(tmp_path_factory.mktemp("filled") / "store"))


class RemoteContract(StoreContract):
    @pytest.fixture
    def store(self, filled, url, tmp_path):
        return FeatureStore.open(RemoteBackend(url, ShardCache(tmp_path / "cache")))


class TestFileUrl(RemoteContract):
    @pytest.fixture
    def url(self, filled):
        return filled.path.as_uri()


class TestMemoryUrl(RemoteContract):
    @pytest.fixture(scope="class")
    def url(self, filled):
        files = fsspec.filesystem("memory")
        files.put(str(filled.path), "/bucket/store", recursive=True)
        yield "memory://bucket/store"
        files.rm("/bucket", recursive=True)


class TestWebServer(RemoteContract):
    @pytest.fixture(scope="class")
    def url(self, filled):
        with serving(filled.path.parent) as server:
            yield f"{server.url}/store"
