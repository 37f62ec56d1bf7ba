# shellcheck shell=sh
# Sets later to what test.sh leaves to check.sh, as go test's -skip takes it: what takes other builds
# of everything (test.sh leaves out some of internal/barefork, too, by -short), what starts other
# languages' programs or a browser most of the time, what waits for ten seconds several times, and what
# does one thing over and over: kills at each step, plants each kind of file, tries each limit, makes
# hundreds of processes.
later='ServeSoak|HostileCells|Languages|PythonClients|NodeClient|Examples|Page|PagesOfOtherSites|Builds|Library|Install'
later="$later|Soak|KilledInPhases|KilledAtSystemCalls|BwrapFake|BwrapSilent|BwrapRelay|BwrapRelayStart|ExecKilledInPhases|ApplyKilled|SnapshotKilled|Races"
later="$later|StatePlanted|StatePlantedAbove|StateGarbageRecord|StateGarbageFiles|StateTruncated|StateDescriptors|DiskFull"
later="$later|Faults|MCPOutput|PackageManagers|Shells|RecordTruncated|NoTaskLeftAtKill|NoTaskOfUserLeft|ForkBomb"
later="$later|OutsideHoldsExec|OutsideHoldsRun|ReaderBlocked|ReaderOfMessagesBlocked"
later="$later|FewDescriptors|SmallLimits|NoTaskLeftAtStart|BigTeardown|ManyEntries|RecycledPIDs|ExecHandlesKept|ExecVeryShortTimeout|DeadlineAtTheEnd"
later="^Test($later)\$"
# Sets rare to what else tries more often the larger SBXRUN_SOAK is: test.sh has it with few tries, and
# check.sh once more with many.
rare='CurrentDirectoryExchanged|MountRace|ExecKilled|ExecSoak|KillMany|KillsItself|NeverReaped|VolumeKilled|CleanupWhileStarting'
rare="$rare|ExecDetachedRandom|ExecHandleKilled|ExecKilledRandomly|ExecWhileKilled|SandboxesKilledRandomly|SandboxKilledRunning|QuitCalls|KilledAfterDelays"
rare="$rare|KilledRandomly|KilledRandomlyIdmapped|KilledRandomlyCapturing|KilledRandomlyAtEnd|KilledRandomlyTerminal|StoppedEarly|ThreadChurn|StartClientKilled"
rare="$rare|StartClientKilledRandom|Together|UnprovenGoes|Slow|MCPKilled"
rare="^Test($rare)\$"
