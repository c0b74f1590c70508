"""Files with which members of a cluster prove themselves to each other: options of `baton serve` and `baton router`."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.values import TransferDigest, require


@dataclass(frozen=True, kw_only=True)
class CredentialOptions:
    cluster_secret: str = ""
    """File with the secrets that routers and instances of a cluster share, one per line. The first one is used, all are
    accepted; a line `revoked NAME` refuses an instance. It is read again after a change. Only its owner may read it; if that is
    root, the process's group too."""
    cluster_ssl_certfile: str = ""
    """PEM file with the certificate that this process shows other members of the cluster: sessions and transfers between
    machines then use TLS. All members need one."""
    cluster_ssl_keyfile: str = ""
    "PEM file with the key of cluster_ssl_certfile, if it is not in that file. Without a password."
    cluster_ssl_ca_certs: str = ""
    "PEM file with the authorities whose certificates other members of the cluster must show. They must sign nothing else."

    def check_credentials(self) -> None:
        """Check the files of these options. Raises InvalidConfig."""
        named = ("cluster_ssl_certfile", "cluster_ssl_ca_certs")
        given = [name for name in named if getattr(self, name)]
        require(len(given) != 1, f"{' and '.join(named)} belong together: give both, or neither")
        require(bool(given) or not self.cluster_ssl_keyfile, "cluster_ssl_keyfile needs cluster_ssl_certfile")
        require(not given or bool(self.cluster_secret), "cluster_ssl_certfile needs a cluster_secret: TLS does not replace it")


@dataclass(frozen=True, kw_only=True)
class MemberOptions(CredentialOptions):
    """Options that the engine and the cache service of an instance share."""

    transfer_digest: TransferDigest = "auto"
    """Digest of KV blocks that this instance reads from other machines. checksum: finds damage. keyed: withstands an attacker
    between the machines too, and is slower. auto: keyed, unless the connection has TLS or stays on this machine."""
    name: str = ""
    "Name of the instance in the cluster. No two may have the same. Without it: host name and port."
