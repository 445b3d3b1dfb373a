{{- define "tierfs.name" -}}
{{- if contains "tierfs" .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}{{ else }}{{ printf "%s-tierfs" (.Release.Name | trunc 41 | trimSuffix "-") }}{{ end -}}
{{- end }}

{{- define "tierfs.labels" -}}
app.kubernetes.io/name: tierfs
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tierfs.selector" -}}
app.kubernetes.io/name: tierfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tierfs.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "tierfs.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end -}}
{{- end }}

{{- define "tierfs.isCluster" -}}
{{- if or .Values.etcd.enabled .Values.externalEtcd.endpoints }}yes{{ end -}}
{{- end }}

{{- /* HOST:PORT of each member; with members' own names, so that one that is away is no obstacle. */}}
{{- define "tierfs.etcdEndpoints" -}}
{{- $name := printf "%s-etcd" (include "tierfs.name" .) -}}
{{- $out := list -}}
{{- if .Values.etcd.enabled -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $out = append $out (printf "%s-%d.%s.%s.svc:2379" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- else -}}
{{- $out = .Values.externalEtcd.endpoints -}}
{{- end -}}
{{- join "," $out -}}
{{- end }}

{{- define "tierfs.etcdTlsSecret" -}}
{{- if .Values.etcd.enabled }}{{ .Values.etcd.tlsSecret }}{{ else }}{{ .Values.externalEtcd.tlsSecret }}{{ end -}}
{{- end }}

{{- define "tierfs.clusterSecret" -}}
{{- default (printf "%s-cluster" (include "tierfs.name" .)) .Values.cluster.existingSecret -}}
{{- end }}

{{- /* Helm reads each number as a float, and toToml would write 5 as 5.0, which is no whole number. Changes the map. */}}
{{- define "tierfs.wholeNumbers" -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value -}}
{{- include "tierfs.wholeNumbers" $value -}}
{{- else if kindIs "float64" $value -}}
{{- if eq (floor $value) $value -}}{{- $_ := set $ $key (int64 $value) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* tierfs.toml: what the chart knows, laid over what was given. */}}
{{- define "tierfs.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $_ := set $settings "size" (printf "%sB" .Values.ramTier.size) -}}
{{- if include "tierfs.isCluster" . -}}
{{- $_ := set $settings "catalog" (printf "etcd://%s" (include "tierfs.etcdEndpoints" .)) -}}
{{- $cluster := default (dict) (get $settings "cluster") -}}
{{- if .Values.cluster.tlsSecret -}}
{{- $_ := set $cluster "tls_cert" "/etc/tierfs/tls/tls.crt" -}}
{{- $_ := set $cluster "tls_key" "/etc/tierfs/tls/tls.key" -}}
{{- $_ := set $cluster "tls_ca" "/etc/tierfs/tls/ca.crt" -}}
{{- else -}}
{{- $_ := set $cluster "secret_file" "/etc/tierfs/secret/secret" -}}
{{- end -}}
{{- $_ := set $settings "cluster" $cluster -}}
{{- $etcd := default (dict) (get $settings "etcd") -}}
{{- if include "tierfs.etcdTlsSecret" . -}}
{{- $_ := set $etcd "ca" "/etc/tierfs/etcd/ca.crt" -}}
{{- $_ := set $etcd "cert" "/etc/tierfs/etcd/tls.crt" -}}
{{- $_ := set $etcd "key" "/etc/tierfs/etcd/tls.key" -}}
{{- end -}}
{{- if and (not .Values.etcd.enabled) .Values.externalEtcd.user -}}
{{- $_ := set $etcd "user" .Values.externalEtcd.user -}}
{{- $_ := set $etcd "password_file" "/etc/tierfs/etcd-password/password" -}}
{{- end -}}
{{- if $etcd -}}{{- $_ := set $settings "etcd" $etcd -}}{{- end -}}
{{- end -}}
{{- if .Values.metrics.enabled -}}
{{- $metrics := default (dict) (get $settings "metrics") -}}
{{- $_ := set $metrics "listen" (printf ":%d" (int .Values.metrics.port)) -}}
{{- $_ := set $settings "metrics" $metrics -}}
{{- end -}}
{{- include "tierfs.wholeNumbers" $settings -}}
{{- toToml $settings -}}
{{- end }}
